"""What DataParallel's copies compute: seen on a thread of its kind, since there are no GPUs here."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.rank.world import World
from ddp_trainer.tasks import load_task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Loader
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies.data_parallel import DataParallel

TASK = load_task("toy_linear", {"samples": 24})


class InThreads(nn.Module):
    """DataParallel's way to call a copy: autocast is on again in the thread, in no type that anyone chose."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_on, outputs = torch.is_autocast_enabled("cpu"), []

        def copy() -> None:
            with torch.autocast("cpu", enabled=is_on, dtype=torch.float16):
                outputs.append(self.module(inputs))

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        return outputs[0]


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> DataParallel:
    monkeypatch.setattr(nn, "DataParallel", InThreads)
    config = TrainConfig(strategy="data_parallel", precision="bf16")
    strategy = DataParallel(config, World(), TASK, Precision("bf16", torch.device("cpu")))
    strategy.wrap(TASK.model())
    return strategy


def test_each_copy_computes_in_the_precision_that_was_asked_for(strategy: DataParallel) -> None:
    inputs, _ = TASK.train_dataset()[:4]
    with strategy.autocast():
        assert strategy.module(inputs).dtype is torch.bfloat16


def test_a_rehearsal_and_a_validation_use_all_gpus(strategy: DataParallel) -> None:
    (batch,) = Loader(TASK.train_dataset(), BatchPlan(samples=24, global_batch=24), World()).epoch(0)
    assert strategy.probe_memory(batch, torch.optim.SGD(strategy.parameters()))
    strategy.predict(batch.micro_batches[0].batch)
    assert strategy.module.calls == 2
