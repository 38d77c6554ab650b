"""Everything a run can be told, in one frozen dataclass: each field is a flag, and a key of the YAML file
that `--config` names (`command_line`).

What cannot work is refused before training starts (`refusals`): a TrainConfig that exists is free of contradictions.
Nothing here imports torch, so a bad flag fails in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddp_trainer.errors import UserError
from ddp_trainer.intervals import Interval, StepWindow
from ddp_trainer.options import option
from ddp_trainer.refusals import refusals


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one run. See the metadata of each field, which is also what `--help` prints."""

    task: str = option("digits", "what to train", "a task that ships here, an entry point, or package.module:build")
    task_options: Mapping[str, Any] = option(
        {}, "what to train", "KEY=VALUE for the task, such as dropout=0.1; may be repeated"
    )
    strategy: str = option("ddp", "what to train", "how the ranks share a step; `single` is the plain loop on one rank")
    epochs: int = option(10, "how long", "passes over the training data")
    max_steps: int | None = option(None, "how long", "stop after this many optimizer steps, even inside an epoch")

    global_batch: int = option(
        64, "batches", "samples of one optimizer step, all ranks together, whatever their number"
    )
    micro_batch: int | None = option(
        None, "batches", "samples a rank takes at once at most; the rest of its share is accumulated"
    )
    last_batch: Literal["keep", "drop"] = option(
        "keep", "batches", "a last batch of an epoch that is not full: train on it as it is, or leave it out"
    )

    optimizer: Literal["sgd", "adam", "adamw"] = option("adamw", "optimizer", "update rule, fused on CUDA")
    lr: float = option(1e-3, "optimizer", "learning rate, after warm-up and before decay")
    momentum: float = option(0.0, "optimizer", "momentum of sgd")
    weight_decay: float = option(
        0.0, "optimizer", "weight decay (decoupled in adamw, added to the gradient in the others)"
    )
    clip_norm: float | None = option(None, "optimizer", "scale the gradient down to this norm where it is longer")
    scheduler: Literal["none", "cosine", "linear", "step"] = option(
        "none", "optimizer", "how the learning rate falls: to 0 as a cosine or a line, or in steps of --decay-every"
    )
    warmup_steps: int = option(0, "optimizer", "steps over which the learning rate first rises in a line")
    decay_every: int | None = option(None, "optimizer", "scheduler=step: steps from one decay to the next")
    decay_factor: float = option(0.1, "optimizer", "scheduler=step: what the learning rate is multiplied with")

    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "arithmetic", "of the forward pass: bf16 and fp16 under autocast, fp16 with a gradient scaler"
    )
    seed: int = option(0, "arithmetic", "of the initial weights, the order of the data, and dropout")
    deterministic: bool = option(
        True,
        "arithmetic",
        "take deterministic kernels where there are any, so that a run can be repeated bit for bit; on CUDA, attention "
        "then takes memory for every pair of positions",
    )
    compile: bool = option(
        False, "arithmetic", "compile the model with torch.compile; the first step then takes longer"
    )

    static_graph: bool = option(False, "ddp", "promise that every step uses the same parameters in the same order")
    find_unused_parameters: bool = option(
        False, "ddp", "look for parameters that a step does not use; costs a walk a step"
    )
    sync_batchnorm: bool = option(False, "ddp", "share batch statistics between the ranks (CUDA only)")

    pipeline_schedule: Literal["1f1b", "gpipe"] = option(
        "1f1b",
        "pipeline",
        "1f1b alternates forward and backward passes and needs less memory; gpipe runs all of one first",
    )

    workers: int = option(0, "data", "processes a rank that load samples; 0 loads in the rank itself")
    prefetch: int = option(2, "data", "micro-batches that each worker loads ahead")

    validate_every: str = option("1epochs", "validation", "how often: such as 1epochs, 500steps, or never")
    eval_batch: int | None = option(
        None, "validation", "samples a rank validates at once; the micro-batch unless given"
    )

    log_every: int = option(10, "output", "steps from one TensorBoard point and one line of output to the next")

    wandb: Literal["off", "offline"] = option(
        "off", "output", "offline: also log to Weights & Biases, in logs/<job>/wandb, without any network"
    )

    profile: str | None = option(
        None, "output", "FIRST:LAST, such as 10:15: record these steps on every rank, in logs/<job>/profile"
    )

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "ranks", "where to train; auto takes CUDA where there is some"
    )
    timeout_seconds: float = option(300.0, "ranks", "how long a collective waits for the other ranks before it fails")

    def __post_init__(self) -> None:
        for refusal in refusals(self):
            raise UserError(refusal)

    @property
    def profile_window(self) -> StepWindow | None:
        """`profile`, parsed."""
        return None if self.profile is None else StepWindow.parse("profile", self.profile)

    @property
    def validation_interval(self) -> Interval:
        """`validate_every`, parsed."""
        return Interval.parse("validate_every", self.validate_every)
