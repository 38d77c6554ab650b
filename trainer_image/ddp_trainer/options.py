"""How a setting is declared: a field of a dataclass that knows what `--help` says of it; its flag has the same name."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, group: str, text: str) -> Any:
    """A field of TrainConfig: its default, the heading it stands under in `--help`, and what it says there."""
    kwargs = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(metadata={"group": group, "help": text}, **kwargs)


def flag(field: str) -> str:
    """`global_batch` as it is written on a command line."""
    return "--" + field.replace("_", "-")
