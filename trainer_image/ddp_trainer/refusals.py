"""Settings that cannot work, each with the field, the value and what to write instead: what is wrong in itself
(`refusals`), and what is wrong for the ranks that torchrun started (`check_world`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddp_trainer.errors import UserError
from ddp_trainer.intervals import Interval, StepWindow
from ddp_trainer.options import flag

if TYPE_CHECKING:
    from ddp_trainer.config import TrainConfig


def refusals(config: TrainConfig) -> Iterator[str]:
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
    if config.max_steps is not None and config.warmup_steps >= config.max_steps:
        yield (
            f"--warmup-steps {config.warmup_steps} leaves nothing of --max-steps {config.max_steps}: the "
            "learning rate would never be reached; lower it"
        )
    if config.strategy != "ddp":
        for field in ("static_graph", "find_unused_parameters", "sync_batchnorm"):
            if getattr(config, field):
                yield f"{flag(field)} belongs to --strategy ddp, not {config.strategy}: leave it out"
    if config.strategy == "fsdp" and config.precision == "fp16":
        yield (
            "--precision fp16 needs a gradient scaler that sees whole gradients, which --strategy fsdp never "
            "has: choose bf16"
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


_LEAST: dict[str, tuple[float, bool]] = {
    "epochs": (1, True),
    "max_steps": (1, True),
    "global_batch": (1, True),
    "micro_batch": (1, True),
    "lr": (0, False),
    "momentum": (0, True),
    "weight_decay": (0, True),
    "clip_norm": (0, False),
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


def _out_of_range(config: TrainConfig) -> Iterator[str]:
    for field, (least, allowed) in _LEAST.items():
        value = getattr(config, field)
        if value is not None and not (value >= least if allowed else value > least):
            bound = "at least" if allowed else "more than"
            yield f"{flag(field)} {value} is out of range: it must be {bound} {least}"


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
