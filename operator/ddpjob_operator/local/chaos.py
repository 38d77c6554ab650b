"""Faults on request: `--chaos kill-rank@50%` shows on this machine that a job survives the death of a process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ddpjob_operator.core.values.trainer_report import TrainerReport

_FORM = re.compile(r"kill-rank(?:=(?P<rank>\d+))?@(?:(?P<percent>\d+(?:\.\d+)?)%|(?P<steps>[1-9]\d{0,8})steps?)")


@dataclass(frozen=True, slots=True)
class KillRank:
    """SIGKILL one rank, once, when training has come so far: a share of the steps, or a number of them."""

    rank: int | None
    """None means the highest, which is never on node rank 0 of a gang of several nodes."""

    fraction: float | None = None
    """Of the total that the trainer reports."""

    steps: int | None = None

    @property
    def moment(self) -> str:
        return f"{100 * self.fraction:g}%" if self.fraction is not None else f"step {self.steps}"

    def describe(self, ranks: int) -> str:
        return f"will kill rank {self.victim(ranks)} with SIGKILL at {self.moment}"

    def victim(self, ranks: int) -> int:
        return ranks - 1 if self.rank is None else self.rank

    def is_due(self, step: int | None, total_steps: int | None) -> bool:
        """Whether training has come so far, and has not ended."""
        if not step or (total_steps is not None and step >= total_steps):
            return False
        if self.fraction is None:
            return self.steps is not None and step >= self.steps
        return total_steps is not None and step >= self.fraction * total_steps

    def never_due(self, step: int | None, total_steps: int | None) -> str | None:
        """Why no moment of this training is the one, from its last report; None if it has one."""
        if not step:
            return "no rank has reported a step to wait for; a script reports those of an optimizer of torch"
        if self.fraction is not None and total_steps is None:
            return (
                f"the script reports its steps but not how many there will be, so {self.moment} of them is not known; "
                "write kill-rank@100steps to name a step, or use attach(total_steps=…)"
            )
        return None


@dataclass(frozen=True, slots=True)
class Victim:
    """A process to kill now."""

    rank: int
    pid: int
    step: int


def parse_chaos(text: str, ranks: int) -> KillRank:
    """`kill-rank[=RANK]@PERCENT%` or `kill-rank[=RANK]@STEPSsteps` for a gang of so many ranks.

    Raises:
        ValueError: if it has another form, names no rank of the gang, or a moment that no run reaches.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a fault; write kill-rank@50%, kill-rank@100steps or kill-rank=0@50%")
    rank = int(match["rank"]) if match["rank"] else None
    if match["steps"]:
        chaos = KillRank(rank, steps=int(match["steps"]))
    else:
        chaos = KillRank(rank, fraction=float(match["percent"]) / 100)
    if chaos.victim(ranks) >= ranks:
        raise ValueError(f"{text!r}: the job has ranks 0 to {ranks - 1}; name one of them")
    if chaos.fraction is not None and not 0 < chaos.fraction < 1:
        raise ValueError(f"{text!r}: use a share between 0% and 100%")
    return chaos


def find_victim(chaos: KillRank, reports: Iterable[TrainerReport], ranks: int) -> Victim | None:
    """The process to kill, from the `/status` answers of the nodes; None while it is too early."""
    for report in reports:
        for rank in report.ranks:
            if rank.rank != chaos.victim(ranks) or not rank.pid or rank.step is None:
                continue
            if chaos.is_due(rank.step, report.total_steps):
                return Victim(rank.rank, rank.pid, rank.step)
    return None
