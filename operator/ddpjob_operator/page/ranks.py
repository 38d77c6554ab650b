"""The ranks of a job as rows of its page; the one that the others wait for is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.core.ledger.ranks import RankRow, Slowest, milliseconds, slowest_of
from ddpjob_operator.core.ledger.summary import duration


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank in words. What is unknown is empty."""

    rank: int
    place: str
    node: str
    phase: str
    step: str
    step_time: str
    data_wait: str
    passes: str
    when: str
    time: str
    slow: str
    """Why this one is the slowest; empty for the others."""


@dataclass(frozen=True, slots=True)
class RanksView:
    """The table of the ranks."""

    rows: tuple[RankView, ...] = ()
    has_data_wait: bool = False
    """Whether any rank measures it: the loop of a script does not."""
    has_passes: bool = False
    """The same of its own forward and backward passes."""


def ranks_view(ranks: Sequence[RankRow], now: datetime) -> RanksView:
    """The ranks in their order."""
    slowest = slowest_of(ranks)
    return RanksView(
        tuple(_view(rank, now, slowest) for rank in sorted(ranks, key=lambda rank: rank.rank)),
        has_data_wait=any(rank.data_seconds is not None for rank in ranks),
        has_passes=any(rank.passes_seconds is not None for rank in ranks),
    )


def _view(rank: RankRow, now: datetime, slowest: Slowest | None) -> RankView:
    last = rank.last_progress
    return RankView(
        rank=rank.rank,
        place=rank.pod,
        node=rank.node,
        phase=rank.phase.replace("_", " "),
        step="" if rank.step is None else f"{rank.step:,}",
        step_time=milliseconds(rank.step_seconds),
        data_wait=milliseconds(rank.data_seconds),
        passes=milliseconds(rank.passes_seconds),
        when=f"{duration((now - last).total_seconds())} ago" if last else "",
        time=last.isoformat() if last else "",
        slow=slowest.reason if slowest is not None and slowest.rank == rank.rank else "",
    )
