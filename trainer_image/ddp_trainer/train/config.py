"""The settings of a run, in one frozen dataclass: each field is a flag, and a key of the YAML file of `--config`
(`command_line`).

Settings that cannot work raise UserError before training starts (`invalid_settings`, `check_world`): a TrainConfig that
exists has no contradictions.
Nothing here imports torch, so a bad flag fails in milliseconds.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ddp_trainer.contract.exit_codes import UserError


def option(default: Any, group: str, text: str, metavar: str = "NAME") -> Any:
    """A field of TrainConfig: its default, and its heading, text and (of strings) metavar in `--help`."""
    kwargs = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(metadata={"group": group, "help": text, "metavar": metavar}, **kwargs)


def flag(field: str) -> str:
    """`global_batch` as it is written on a command line."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class Interval:
    """So many steps, so many epochs, or (0) never."""

    count: int
    unit: Literal["steps", "epochs"]

    @classmethod
    def parse(cls, field: str, text: str) -> Interval:
        """`10steps`, `2epochs` or `never`; UserError otherwise."""
        if text == "never":
            return cls(0, "steps")
        match = re.fullmatch(r"([1-9]\d*)(steps|epochs)", text)
        if match is None:
            raise UserError(f"{flag(field)} {text!r} is no interval: write such as 100steps, 1epochs, or never")
        return cls(int(match[1]), typing.cast(Literal["steps", "epochs"], match[2]))

    def due(self, *, step: int, finished_epochs: int, epoch_end: bool) -> bool:
        """Whether it is time after `step` steps; `epoch_end` when the last of them ended an epoch."""
        if self.count == 0:
            return False
        if self.unit == "steps":
            return step % self.count == 0
        return epoch_end and finished_epochs % self.count == 0


@dataclass(frozen=True)
class StepWindow:
    """Steps `first` to `last`, both included, counted from 1 in the whole run."""

    first: int
    last: int

    @classmethod
    def parse(cls, field: str, text: str) -> StepWindow:
        """`10:15`; UserError otherwise."""
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
        if match is None or int(match[1]) > int(match[2]):
            raise UserError(
                f"{flag(field)} {text!r} is no window of steps: write the first and the last, such as 10:15"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one run. See the metadata of each field, which is also what `--help` prints."""

    task: str = option("digits", "task and strategy", "built-in task, entry point, or package.module:build")
    task_options: Mapping[str, Any] = option(
        {}, "task and strategy", "KEY=VALUE option of the task, such as dropout=0.1; can be repeated"
    )
    strategy: str = option("ddp", "task and strategy", "how ranks train together; `single` is a plain loop on one rank")
    epochs: int = option(10, "duration", "number of epochs")
    max_steps: int | None = option(None, "duration", "stop after this many optimizer steps, also within an epoch")

    global_batch: int = option(64, "batches", "samples per optimizer step, all ranks together")
    micro_batch: int | None = option(
        None,
        "batches",
        "maximum samples per forward and backward pass of a rank; gradients are accumulated over the passes of a step",
    )
    last_batch: Literal["keep", "drop"] = option(
        "keep", "batches", "what to do with an incomplete last batch of an epoch"
    )

    optimizer: Literal["sgd", "adam", "adamw"] = option("adamw", "optimizer", "optimizer, fused on CUDA")
    lr: float = option(1e-3, "optimizer", "learning rate after warm-up, before decay")
    momentum: float = option(0.0, "optimizer", "momentum (sgd only)")
    weight_decay: float = option(0.0, "optimizer", "weight decay (decoupled for adamw, L2 penalty for the others)")
    clip_norm: float | None = option(None, "optimizer", "maximum gradient norm")
    scheduler: Literal["none", "cosine", "linear", "step"] = option(
        "none",
        "optimizer",
        "learning-rate schedule: cosine or linear decay to 0, or step decay every --decay-every steps",
    )
    warmup_steps: int = option(0, "optimizer", "steps of linear warm-up")
    decay_every: int | None = option(None, "optimizer", "scheduler=step: steps between decays")
    decay_factor: float = option(0.1, "optimizer", "scheduler=step: factor of each decay")

    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "numerics", "precision of the forward pass: bf16 and fp16 use autocast, fp16 also a gradient scaler"
    )
    scaler_init_scale: float = option(65536.0, "numerics", "fp16: initial loss scale of the gradient scaler")
    scaler_growth_factor: float = option(2.0, "numerics", "fp16: factor by which the loss scale grows")
    scaler_backoff_factor: float = option(0.5, "numerics", "fp16: factor of the loss scale after a skipped step")
    scaler_growth_interval: int = option(2000, "numerics", "fp16: steps without a skip after which the scale grows")
    seed: int = option(0, "numerics", "random seed of initial weights, data order and dropout")
    deterministic: bool = option(
        True,
        "numerics",
        "use deterministic kernels, for bitwise reproducible runs",
    )
    compile: bool = option(False, "numerics", "use torch.compile; the first step takes longer")

    static_graph: bool = option(False, "ddp", "every step uses the same parameters in the same order")
    find_unused_parameters: bool = option(
        False, "ddp", "find parameters that a step does not use; traverses the graph in every step"
    )
    sync_batchnorm: bool = option(False, "ddp", "synchronise batch statistics between ranks (CUDA only)")

    pipeline_schedule: Literal["1f1b", "gpipe"] = option(
        "1f1b",
        "pipeline",
        "1f1b alternates forward and backward passes and needs less memory; gpipe runs all forward passes first",
    )

    shuffle: bool = option(True, "data", "train on the samples in a random order, another one in each epoch")
    workers: int = option(0, "data", "DataLoader workers per rank; 0 loads in the rank")
    prefetch: int = option(2, "data", "micro-batches that each worker prefetches")

    validate_every: str = option(
        "1epochs", "validation", "validation interval, such as 1epochs or 500steps, or never", "INTERVAL"
    )
    eval_batch: int | None = option(
        None, "validation", "samples per validation pass of a rank; default: the micro-batch"
    )

    log_every: int = option(10, "output", "steps between TensorBoard points and log lines")

    wandb: Literal["off", "offline"] = option(
        "off", "output", "offline: also log for Weights & Biases, in logs/<job>/wandb, without network access"
    )

    profile: str | None = option(
        None, "output", "profile these steps on every rank, such as 10:15, in logs/<job>/profile", "FIRST:LAST"
    )

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "distributed", "device to train on; auto uses CUDA if available"
    )
    timeout_seconds: float = option(300.0, "distributed", "timeout of collectives in seconds")

    def __post_init__(self) -> None:
        for problem in invalid_settings(self):
            raise UserError(problem)

    @property
    def profile_window(self) -> StepWindow | None:
        """`profile`, parsed."""
        return None if self.profile is None else StepWindow.parse("profile", self.profile)

    @property
    def validation_interval(self) -> Interval:
        """`validate_every`, parsed."""
        return Interval.parse("validate_every", self.validate_every)


def invalid_settings(config: TrainConfig) -> Iterator[str]:
    """What is wrong with the settings in themselves, worst first."""
    default = type(config)
    yield from _out_of_range(config)
    Interval.parse("validate_every", config.validate_every)
    if config.profile is not None:
        StepWindow.parse("profile", config.profile)
    if config.micro_batch is not None and config.micro_batch > config.global_batch:
        yield (
            f"--micro-batch {config.micro_batch} is more than --global-batch {config.global_batch}, of which "
            "it is a part: lower it, or raise --global-batch"
        )
    if config.momentum and config.optimizer != "sgd":
        yield (
            f"--momentum {config.momentum} has no meaning for --optimizer {config.optimizer}: leave it out, "
            "or choose sgd"
        )
    if (config.decay_every is not None) != (config.scheduler == "step"):
        yield (
            "--scheduler step needs --decay-every, the steps from one decay to the next"
            if config.decay_every is None
            else f"--decay-every {config.decay_every} belongs to --scheduler step, not {config.scheduler}: choose one"
        )
    if config.decay_factor != default.decay_factor and config.scheduler != "step":
        yield f"--decay-factor {config.decay_factor} belongs to --scheduler step, not {config.scheduler}: leave it out"
    if config.max_steps is not None and config.warmup_steps >= config.max_steps:
        yield (
            f"--warmup-steps {config.warmup_steps} leaves nothing of --max-steps {config.max_steps}: the "
            "learning rate would never be reached; lower it"
        )
    if config.scaler_backoff_factor >= 1:
        yield f"--scaler-backoff-factor {config.scaler_backoff_factor} is out of range: it must be less than 1"
    if config.precision != "fp16":
        for field in SCALER:
            if getattr(config, field) != getattr(default, field):
                yield f"{flag(field)} belongs to --precision fp16, not {config.precision}: leave it out"
    if config.strategy != "ddp":
        for field in ("static_graph", "find_unused_parameters", "sync_batchnorm"):
            if getattr(config, field):
                yield f"{flag(field)} belongs to --strategy ddp, not {config.strategy}: leave it out"
    if config.strategy in ("fsdp", "hsdp") and config.precision == "fp16":
        yield (
            f"--precision fp16 needs a gradient scaler that sees whole gradients, which --strategy {config.strategy} "
            "never has: choose bf16"
        )
    if config.strategy == "data_parallel" and config.compile:
        yield "--compile compiles one model, which --strategy data_parallel copies in every step: choose --strategy ddp"
    if config.strategy == "pipeline":
        if config.precision == "fp16":
            yield (
                "--precision fp16 needs a gradient scaler that sees all gradients, which no stage of "
                "--strategy pipeline does: choose bf16"
            )
        if config.compile:
            yield "--compile compiles a whole model, which no stage of --strategy pipeline has: leave it out"
    elif config.pipeline_schedule != default.pipeline_schedule:
        yield f"--pipeline-schedule belongs to --strategy pipeline, not {config.strategy}: leave it out"
    if config.static_graph and config.find_unused_parameters:
        yield (
            "--static-graph and --find-unused-parameters contradict each other: a static graph finds them "
            "once by itself; leave --find-unused-parameters out"
        )
    if config.prefetch != default.prefetch and not config.workers:
        yield f"--prefetch {config.prefetch} needs --workers: without workers nothing is loaded ahead"


SCALER = ("scaler_init_scale", "scaler_growth_factor", "scaler_backoff_factor", "scaler_growth_interval")
"""Arguments of torch.amp.GradScaler, without the prefix."""

_LEAST: dict[str, tuple[float, bool]] = {
    "epochs": (1, True),
    "max_steps": (1, True),
    "global_batch": (1, True),
    "micro_batch": (1, True),
    "lr": (0, False),
    "momentum": (0, True),
    "weight_decay": (0, True),
    "clip_norm": (0, False),
    "scaler_init_scale": (0, False),
    "scaler_growth_factor": (1, False),
    "scaler_backoff_factor": (0, False),
    "scaler_growth_interval": (1, True),
    "warmup_steps": (0, True),
    "decay_every": (1, True),
    "decay_factor": (0, False),
    "seed": (0, True),
    "workers": (0, True),
    "prefetch": (1, True),
    "eval_batch": (1, True),
    "log_every": (1, True),
    "timeout_seconds": (0, False),
}
"""The least value of each number, and whether it is allowed itself."""


_LARGEST: Final = 3.4e38
"""Of fp32."""

_MOST: Final = {
    "lr": _LARGEST,
    "momentum": _LARGEST,
    "weight_decay": _LARGEST,
    "decay_factor": _LARGEST,
    "scaler_init_scale": _LARGEST,
    "scaler_growth_factor": _LARGEST,
    "timeout_seconds": 1e6,
}
"""The most of each number that torch computes with or waits for; a norm may be infinite, which clips nothing."""


def _out_of_range(config: TrainConfig) -> Iterator[str]:
    for field, (least, allowed) in _LEAST.items():
        value = getattr(config, field)
        if value is not None and not (value >= least if allowed else value > least):
            bound = "at least" if allowed else "more than"
            yield f"{flag(field)} {value} is out of range: it must be {bound} {least}"
    for field, most in _MOST.items():
        if getattr(config, field) > most:
            yield f"{flag(field)} {getattr(config, field)} is out of range: it must be at most {most:g}"


def check_elastic(config: TrainConfig, min_nodes: int | None) -> None:
    """Refuse a strategy that cannot resume with another number of ranks where the number of nodes may change, down to
    `min_nodes`; the operator sees only one that is in `spec.args`. Raises UserError.
    """
    if config.strategy == "pipeline" and min_nodes is not None:
        raise UserError(
            f"--strategy pipeline (`strategy: pipeline` in the file of --config) resumes with the same number of ranks "
            f"only, and spec.elastic.minNodes is {min_nodes}: remove spec.elastic, or use --strategy fsdp"
        )


def check_scope(config: TrainConfig, *, is_live: bool) -> None:
    """Refuse a strategy that only works with live recovery where ranks do not recover so. Raises UserError."""
    if config.strategy == "hsdp" and not is_live:
        raise UserError(
            "--strategy hsdp shards the model within each pod, so that the others go on without one: it needs "
            "restart.scope Live; set it, or use --strategy fsdp"
        )


def check_world(
    config: TrainConfig,
    *,
    world_size: int,
    device: str,
    devices: int = 0,
    find: Callable[[str], str | None] = shutil.which,
) -> None:
    """Refuse what cannot work with this many ranks on this kind of device, of which this node has `devices`, with
    the programs that `find` finds here.

    Raises UserError.
    """
    if config.strategy in ("single", "data_parallel") and world_size > 1:
        raise UserError(
            f"--strategy {config.strategy} trains on one rank, but {world_size} were started: choose "
            "--strategy ddp, or start one process"
        )
    if config.strategy == "data_parallel" and (device != "cuda" or devices < 2):
        have = f"{devices} GPU" if device == "cuda" else "the CPU"
        raise UserError(
            "--strategy data_parallel splits each batch among the GPUs of one process; on "
            f"{have} torch.nn.DataParallel does nothing: choose --strategy ddp, or single on one rank"
        )
    if config.strategy == "pipeline":
        micro_batch = config.micro_batch or max(1, config.global_batch // (4 * world_size))
        if -(-config.global_batch // micro_batch) < world_size:
            raise UserError(
                f"--micro-batch {micro_batch} cuts --global-batch {config.global_batch} into fewer "
                f"micro-batches than the {world_size} stages of the pipeline, so some would never work: "
                "lower it"
            )
    elif config.global_batch % world_size:
        low = config.global_batch // world_size * world_size
        near = " or ".join(str(size) for size in (low, low + world_size) if size)
        raise UserError(
            f"--global-batch {config.global_batch} cannot be divided among {world_size} ranks, and it stays "
            f"the same whatever the number of ranks: choose {near}, or a number of ranks that divides "
            f"{config.global_batch}"
        )
    if config.sync_batchnorm and device != "cuda":
        raise UserError(
            f"--sync-batchnorm needs CUDA: torch.nn.SyncBatchNorm has no kernel for {device}; leave it out, "
            "or use GroupNorm or LayerNorm in the model"
        )
    if config.compile and not any(find(name) for name in _compilers(device)):
        raise UserError(
            f"--compile needs a compiler, and there is no {' or '.join(_compilers(device))} here: install g++ (in the "
            "image, on a cluster), or leave --compile out"
        )


def _compilers(device: str) -> tuple[str, ...]:
    """Those that torch.compile calls, one of which is enough: Triton for its launchers in C, inductor for the kernels
    of a CPU in C++.
    """
    if device == "cuda":
        return (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    return (os.environ.get("CXX", "g++"),)
