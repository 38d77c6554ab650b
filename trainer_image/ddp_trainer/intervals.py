"""Steps that a setting names: every so many of them, or a window.

Nothing here imports torch, so a bad flag fails in milliseconds.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from typing import Literal

from ddp_trainer.errors import UserError
from ddp_trainer.options import flag


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
