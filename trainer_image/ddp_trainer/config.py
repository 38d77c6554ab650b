"""Everything a run can be told, in one frozen dataclass: each field is a flag, and a key of the YAML file
that `--config` names.

A flag wins over the file, the file over the default. What cannot work is refused before training starts, with
the field, the value and what to write instead: first what is wrong in itself (`parse`), then what is wrong
for the ranks that torchrun started (`check_world`). Nothing here imports torch, so a bad flag fails in
milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddp_trainer.errors import UserError


def option(default: Any, group: str, text: str) -> Any:
    """A field of TrainConfig: its default, the heading it stands under in `--help`, and what it says there."""
    kwargs = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(metadata={"group": group, "help": text}, **kwargs)


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
        True, "arithmetic", "take deterministic kernels where there are any, so that a run can be repeated bit for bit"
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

    profile: str | None = option(
        None, "output", "FIRST:LAST, such as 10:15: record these steps on every rank, in logs/<job>/profile"
    )

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "ranks", "where to train; auto takes CUDA where there is some"
    )
    timeout_seconds: float = option(300.0, "ranks", "how long a collective waits for the other ranks before it fails")

    def __post_init__(self) -> None:
        for refusal in _refusals(self):
            raise UserError(refusal)

    @property
    def profile_window(self) -> StepWindow | None:
        """`profile`, parsed."""
        return None if self.profile is None else StepWindow.parse("profile", self.profile)

    @property
    def validation_interval(self) -> Interval:
        """`validate_every`, parsed."""
        return Interval.parse("validate_every", self.validate_every)


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


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that a command line asks for.

    Raises UserError for an unknown flag or key, a value of the wrong kind, and settings that contradict each
    other. `--help` prints and exits.
    """
    given = vars(_parser().parse_args(list(argv)))
    path = given.pop("config", None)
    values = _read_file(Path(path)) if path else {}
    options = dict(_option_pair(text) for text in given.pop("task_options", ()))
    if options:
        values["task_options"] = {**values.get("task_options", {}), **options}
    return TrainConfig(**{**values, **given})


def check_world(config: TrainConfig, *, world_size: int, device: str, devices: int = 0) -> None:
    """Refuse what cannot work with this many ranks on this kind of device, of which this node has `devices`.

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


def flag(field: str) -> str:
    """`global_batch` as it is written on a command line."""
    return "--" + field.replace("_", "-")


def _refusals(config: TrainConfig) -> Iterator[str]:
    """What is wrong with the settings in themselves, worst first."""
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
    if config.strategy == "pipeline":
        if config.precision == "fp16":
            yield (
                "--precision fp16 needs a gradient scaler that sees all gradients, which no stage of "
                "--strategy pipeline does: choose bf16"
            )
        if config.compile:
            yield "--compile compiles a whole model, which no stage of --strategy pipeline has: leave it out"
    elif config.pipeline_schedule != TrainConfig.pipeline_schedule:
        yield f"--pipeline-schedule belongs to --strategy pipeline, not {config.strategy}: leave it out"
    if config.static_graph and config.find_unused_parameters:
        yield (
            "--static-graph and --find-unused-parameters contradict each other: a static graph finds them "
            "once by itself; leave --find-unused-parameters out"
        )
    if config.prefetch != TrainConfig.prefetch and not config.workers:
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


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one message with a fix, and the exit code of a user's error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; `{self.prog} --help` lists all flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddp_trainer.train",
        usage="python -m ddp_trainer.train [--config FILE] [--task TASK] [--strategy STRATEGY] [flags]",
        description="Train a task on all ranks that torchrun started; without torchrun, on one.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of these same settings; a flag wins over it")
    hints = typing.get_type_hints(TrainConfig)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        name = field.metadata["group"]
        group = groups[name] = groups.get(name) or parser.add_argument_group(name)
        group.add_argument(flag(field.name), **_argument(field, hints[field.name]))
    return parser


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    kind = _kind(hint)
    text = field.metadata["help"]
    if kind is dict:
        return {"action": "append", "metavar": "KEY=VALUE", "help": text}
    shown = text if field.default is None else f"{text} (default: {field.default})"
    if kind is bool:
        # argparse shows the flag and its --no- form by itself
        return {"action": argparse.BooleanOptionalAction, "help": shown}
    if isinstance(kind, tuple):
        return {"choices": kind, "help": shown}
    read, metavar = {int: (_whole_number, "N"), float: (_number, "X"), str: (str, "NAME")}[kind]
    return {"type": read, "metavar": metavar, "help": shown}


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _kind(hint: Any) -> Any:
    """int, float, bool, str, dict, or the tuple of what a Literal allows; Optional is looked through."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return dict if typing.get_origin(hint) is not None else hint


def _read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, each of its field's type. Keys may be written with - or _."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(document or {}, dict):
        raise UserError(
            f"--config {path} must be a mapping of settings, such as `epochs: 20`, not a {type(document).__name__}"
        )
    hints = typing.get_type_hints(TrainConfig)
    values = {}
    for key, value in (document or {}).items():
        field = str(key).replace("-", "_")
        if field not in hints:
            close = difflib.get_close_matches(field, hints, n=1)
            hint = f"did you mean {close[0]}?" if close else "`--help` lists all settings."
            raise UserError(f"--config {path}: {key} is no setting: {hint}")
        values[field] = _from_yaml(f"--config {path}: {field}", value, hints[field])
    return values


def _from_yaml(where: str, value: Any, hint: Any) -> Any:
    kind = _kind(hint)
    if value is None and type(None) in typing.get_args(hint):
        return None
    if isinstance(kind, tuple):
        if value in kind:
            return value
        raise UserError(f"{where} {value!r} is unknown: choose one of {', '.join(kind)}")
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        # YAML 1.1 takes 1e-3 for a string: it wants 1.0e-3
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}[kind]
    raise UserError(f"{where} {value!r} must be {wanted}")


def _option_pair(text: str) -> tuple[str, Any]:
    """`dropout=0.1` as a name and a value: a number, true or false where it looks like one, else text."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UserError(f"--task-options {text!r} must be KEY=VALUE, such as dropout=0.1")
    if value in ("true", "false"):
        return key, value == "true"
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value
