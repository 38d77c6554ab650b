"""The ranks of a job as rows of its page, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from ddpjob_operator.core.ledger.summary import duration
from ddpjob_operator.page.values import RankRow

_SLOWER = 1.1
"""Of the median of all ranks: a rank whose steps take longer is slow."""
_WAITS = 0.1
"""Of a step: a rank that waits so much longer for its data than the others delays them."""


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


def ranks_view(ranks: Sequence[RankRow], now: datetime) -> RanksView:
    """The ranks in their order."""
    slowest = slowest_of(ranks)
    rows = (_view(rank, now, slowest) for rank in sorted(ranks, key=lambda rank: rank.rank))
    return RanksView(tuple(rows), any(rank.data_seconds is not None for rank in ranks))


def slowest_of(ranks: Sequence[RankRow]) -> tuple[int, str] | None:
    """The rank that the others wait for, and why; None where none stands out.

    Ranks meet at each gradient reduction, so that one whose own work is slow makes the steps of all of them as long.
    Its own wait for data is seen all the same.
    """
    timed = [(rank.step_seconds, rank.rank) for rank in ranks if rank.step_seconds]
    if len(timed) < 2:
        return None
    usual = median(seconds for seconds, _ in timed)
    longest, rank = max(timed, key=lambda found: (found[0], -found[1]))
    if longest >= _SLOWER * usual:
        return rank, f"its steps take {longest / usual:.1f} times the median of all ranks"
    waits = [(found.data_seconds, found.rank) for found in ranks if found.data_seconds is not None]
    if len(waits) < 2:
        return None
    wait, rank = max(waits, key=lambda found: (found[0], -found[1]))
    more = wait - median(seconds for seconds, _ in waits)
    if more < _WAITS * usual:
        return None
    return rank, f"it waits {milliseconds(more)} longer for the data of a step than the median rank"


def milliseconds(seconds: float | None) -> str:
    """Such as `4.2 ms` or `1.35 s`; empty for None."""
    if seconds is None:
        return ""
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1000:.2g} ms"
        if seconds < 0.1
        else f"{seconds * 1000:.0f} ms"
    )


def _view(rank: RankRow, now: datetime, slowest: tuple[int, str] | None) -> RankView:
    return RankView(
        rank=rank.rank,
        place=rank.pod,
        node=rank.node,
        phase=rank.phase.replace("_", " "),
        step="" if rank.step is None else f"{rank.step:,}",
        step_time=milliseconds(rank.step_seconds),
        data_wait=milliseconds(rank.data_seconds),
        when=f"{duration((now - rank.time).total_seconds())} ago" if rank.time else "",
        time=rank.time.isoformat() if rank.time else "",
        slow=slowest[1] if slowest is not None and slowest[0] == rank.rank else "",
    )
