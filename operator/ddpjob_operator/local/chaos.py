"""Faults on request: `--chaos kill-rank@50%` shows on this machine that a job survives the death of a process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ddpjob_operator.core.values.trainer_report import TrainerReport

_FORM = re.compile(r"kill-rank(?:=(?P<rank>\d+))?@(?P<percent>\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class KillRank:
    """SIGKILL one rank, once, when training has come so far."""

    rank: int | None
    """None means the highest, which is never on node rank 0 of a gang of several nodes."""

    fraction: float

    def describe(self, ranks: int) -> str:
        return f"will kill rank {self.victim(ranks)} with SIGKILL at {self.fraction:.0%}"

    def victim(self, ranks: int) -> int:
        return ranks - 1 if self.rank is None else self.rank


@dataclass(frozen=True, slots=True)
class Victim:
    """A process to kill now."""

    rank: int
    pid: int
    step: int


def parse_chaos(text: str, ranks: int) -> KillRank:
    """`kill-rank[=RANK]@PERCENT%` for a gang of so many ranks.

    Raises:
        ValueError: if it has another form, names no rank of the gang, or a share that no run reaches.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a fault; write kill-rank@50% or kill-rank=0@50%")
    chaos = KillRank(int(match["rank"]) if match["rank"] else None, float(match["percent"]) / 100)
    if chaos.victim(ranks) >= ranks:
        raise ValueError(f"{text!r}: the job has ranks 0 to {ranks - 1}; name one of them")
    if not 0 < chaos.fraction < 1:
        raise ValueError(f"{text!r}: use a share between 0% and 100%")
    return chaos


def find_victim(chaos: KillRank, reports: Iterable[TrainerReport], ranks: int) -> Victim | None:
    """The process to kill, from the `/status` answers of the nodes; None while it is too early."""
    for report in reports:
        for rank in report.ranks:
            if rank.rank != chaos.victim(ranks) or not rank.pid:
                continue
            if rank.step and report.total_steps and chaos.fraction <= rank.step / report.total_steps < 1:
                return Victim(rank.rank, rank.pid, rank.step)
    return None
