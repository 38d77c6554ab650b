"""Optimizer and learning-rate scheduler, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.train.config import TrainConfig, flag

SETTINGS: Final = ("optimizer", "lr", "momentum", "weight_decay")
"""Fields of the configuration that an optimizer is built with, and then keeps in its own state."""


def build_optimizer(
    config: TrainConfig, parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer over `parameters`, which must be those of the model that is trained, after it was placed
    and wrapped.

    Raises UserError when the model has none to train.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise UserError(
            f"task {config.task!r}: the model has no parameter that requires a gradient, so there is nothing to train"
        )
    shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if device.type == "cuda":
        shared["fused"] = True
    if config.optimizer == "sgd":
        return torch.optim.SGD(trainable, momentum=config.momentum, **shared)
    if config.optimizer == "adam":
        return torch.optim.Adam(trainable, **shared)
    return torch.optim.AdamW(trainable, **shared)


def state_to_come(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size its first step will make for each, and keep: none once it has been."""
    if optimizer.state:
        return 0
    return int(bool(optimizer.defaults["momentum"])) if isinstance(optimizer, torch.optim.SGD) else 2


class OptimizerSettings:
    """What the run's optimizer was built with, as a state of the snapshot.

    An optimizer that loads its state takes over the saved settings whole: without this, another learning rate would
    be ignored in silence, and another kind of optimizer would fail at its first step, or not at all.
    """

    may_be_absent: ClassVar[bool] = True
    """From snapshots of versions that did not compare settings."""

    def __init__(self, config: TrainConfig) -> None:
        self._settings = {name: getattr(config, name) for name in SETTINGS}

    def state_dict(self) -> dict[str, Any]:
        return self._settings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError when this run was given other settings."""
        for name, saved in state.items():
            own = self._settings.get(name)
            if own != saved:
                raise UserError(
                    f"the snapshot's run had {flag(name)} {saved}, this one has {own}, and an optimizer goes on as it "
                    "was saved: go on with the settings it had, or train under another job name to start anew"
                )


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """The scheduler to step once an optimizer step. Raises UserError when warm-up would outlast the run."""
    if config.warmup_steps >= total_steps:
        raise UserError(
            f"--warmup-steps {config.warmup_steps} leaves nothing of the {total_steps} steps of this run: "
            "the learning rate would never be reached; lower it"
        )
    return Schedule(optimizer, lambda step: lr_factor(config, step, total_steps))


class Schedule(LambdaLR):
    """A LambdaLR whose rate is that of its own settings from the first step after a resume on.

    torch's restores the last rate of the snapshot's run, also where this one decays otherwise or over more steps: the
    step after the end of a decay to 0 would change nothing.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        rates = [base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


def lr_factor(config: TrainConfig, step: int, total_steps: int) -> float:
    """What the learning rate is multiplied with after `step` finished steps.

    Warm-up rises from 1/warmup_steps to 1, so that the first step already moves; the decay runs over the
    steps after it.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.scheduler == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.scheduler == "linear":
        return 1 - min(1.0, done)
    if config.scheduler == "step":
        assert config.decay_every is not None
        return config.decay_factor ** ((step - config.warmup_steps) // config.decay_every)
    return 1.0
