"""From a command line and the YAML file that `--config` names to a TrainConfig.

A flag wins over the file, the file over the default. Flags, keys, their types and `--help` all come from the fields of
TrainConfig, so a setting is declared once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.train.config import TrainConfig, flag


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


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one message with a fix, and the exit code of a user's error."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        raise UserError(f"{message}{self._nearest(message)}; `{self.prog} --help` lists all flags")

    def _nearest(self, message: str) -> str:
        """What may have been meant by the first flag that is not known."""
        unknown = re.search(r"unrecognized arguments: .*?(--[^\s=]+)", message)
        close = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        return f"; did you mean {close[0]}?" if close else ""


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
    read, metavar = {int: (_whole_number, "N"), float: (_number, "X"), str: (str, field.metadata["metavar"])}[kind]
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
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path} is no text in UTF-8: save it as that ({error})") from error
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
        if value is False and "off" in kind:
            return "off"  # which YAML 1.1 takes for false
        if value in kind:
            return value
        raise UserError(f"{where} {value!r} is unknown: choose one of {', '.join(kind)}")
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        # YAML 1.1 takes 1e-3 for a string: it wants 1.0e-3
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    wanted = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text, in quotes",
        dict: "a mapping",
    }[kind]
    read = " as YAML reads it" if kind is str and isinstance(value, int) else ""
    raise UserError(f"{where} {value!r}{read} must be {wanted}")


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
