"""Tasks with a fault that only a GPU has, in attempt 0, named as `--task gpu_tasks:Name`."""

from __future__ import annotations

import os
import signal
import threading
from abc import abstractmethod

import torch
from torch import Tensor, nn

from ddp_trainer.tasks.digits import Digits

GIB = 1 << 30
IS_FIRST = os.environ.get("DDPJOB_ATTEMPT", "0") == "0"


class AtALoss(Digits):
    """Digits that do something at their `call`-th loss of training in attempt 0."""

    def __init__(self, call: int = 250) -> None:
        super().__init__(width=8)
        self._call = call if IS_FIRST else 0
        self._calls = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._calls += torch.is_grad_enabled()
        if self._calls == self._call and torch.is_grad_enabled():
            self.fault(output)
        return super().loss(output, batch)

    @abstractmethod
    def fault(self, output: Tensor) -> None:
        """What happens then."""


class Asserts(AtALoss):
    """An index that a kernel rejects, after which the context of CUDA is of no use."""

    def fault(self, output: Tensor) -> None:
        torch.zeros(4, device=output.device)[torch.tensor([9], device=output.device)].sum()


class Spins(AtALoss):
    """A kernel that does not end, with 2 GiB held meanwhile."""

    def fault(self, output: Tensor) -> None:
        self._held = torch.ones(2 * GIB, dtype=torch.uint8, device=output.device)
        torch.cuda._sleep(1 << 45)


class Hungry(Digits):
    """Digits that take 64 MiB a sample while a loss is computed, on a device that has 3 GiB for them."""

    def __init__(self, where: str = "training", first: int = 1) -> None:
        super().__init__(width=8)
        torch.cuda.set_per_process_memory_fraction(3 * GIB / torch.cuda.get_device_properties(0).total_memory)
        self._training = where == "training"
        self._first = first
        self._calls = 0

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        is_there = torch.is_grad_enabled() == self._training
        self._calls += is_there
        if is_there and self._calls >= self._first:
            # one by one: a single block would not fit into what a smaller one has left
            _ = [torch.ones(64 << 20, dtype=torch.uint8, device=output.device) for _ in output]
        return super().loss(output, batch)


class WithoutDeterministicKernel(Digits):
    """Digits behind a pooling layer whose backward pass has no deterministic kernel on CUDA."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(100, 10))


class StoppedWhileCompiling(Digits):
    """SIGTERM half a second after the first forward pass has begun, which torch.compile takes longer for."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_pre_hook(self._begun)
        return model

    @torch._dynamo.disable
    def _begun(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if IS_FIRST:
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
            timer.daemon = True
            timer.start()
            globals()["IS_FIRST"] = False
