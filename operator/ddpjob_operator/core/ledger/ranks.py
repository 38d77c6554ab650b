"""What the ranks of a running job say of themselves, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median_low
from typing import Final

from ddpjob_operator.core.values.trainer_report import LiveReport, Throttling, TrainerReport

_SLOWER = 1.1
"""Of the median of all ranks: a rank whose steps or passes take longer is slow."""
_WAITS = 0.1
"""Of a step: a rank that waits so much longer for its data than the others delays them."""
_WORKS = 0.2
"""Of a step: the same of its own passes, of which few are measured."""
_NOTICED = 0.1
"""Of a step, or of a pod's time: what is less is left unsaid."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank as it last reported. None is unknown."""

    rank: int
    pod: str = ""
    node: str = ""
    """The Kubernetes node."""
    phase: str = ""
    step: int | None = None
    step_seconds: float | None = None
    """Median of the last steps."""
    data_seconds: float | None = None
    """Median of what they waited for data."""
    time: datetime | None = None
    """Of its last progress, or of the beginning of its phase."""
    passes_seconds: float | None = None
    """Median of its own forward and backward passes, the wait for other ranks left out."""

    @property
    def last_progress(self) -> datetime | None:
        """None also for a script whose steps are not seen: it may be silent for long."""
        return None if self.phase == "script" else self.time


@dataclass(frozen=True, slots=True)
class PodThrottling:
    """What the CPU limit did to a pod lately."""

    pod: str
    node: str
    found: Throttling

    @property
    def share(self) -> float:
        """Of the periods in which it ran, those in which it was stopped; 0 to 1."""
        return self.found.throttled_periods / self.found.periods


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that the others wait for."""

    rank: int
    reason: str
    """Why, without a full stop."""
    waits_for_data: bool = False


@dataclass(frozen=True, slots=True)
class Reports:
    """What the pods of one attempt say."""

    ranks: tuple[RankRow, ...] = ()
    throttling: tuple[PodThrottling, ...] = ()
    """Of pods that have a CPU limit."""
    note: str = ""
    """Why some of it is missing."""
    live: LiveReport | None = None
    """Of a job that recovers live."""


NO_REPORTS: Final = Reports()


def reports_of(report: TrainerReport, pod: str, node: str, now: datetime) -> Reports:
    """What one pod says."""
    ranks = tuple(
        RankRow(
            rank=rank.rank,
            pod=pod,
            node=node,
            phase=rank.phase if rank.phase.isprintable() else "",
            step=rank.step,
            step_seconds=rank.step_seconds,
            data_seconds=rank.data_seconds,
            time=None if rank.age_seconds is None else now - timedelta(seconds=rank.age_seconds),
            passes_seconds=rank.passes_seconds,
        )
        for rank in report.ranks
    )
    found = report.throttling
    return Reports(ranks, (PodThrottling(pod, node, found),) if found is not None else (), live=report.live)


def together(reports: Sequence[Reports], note: str = "") -> Reports:
    """What several pods say, in the order of their ranks."""
    ranks = sorted((rank for each in reports for rank in each.ranks), key=lambda rank: rank.rank)
    throttling = tuple(pod for each in reports for pod in each.throttling)
    return Reports(tuple(ranks), throttling, note, furthest([each.live for each in reports]))


def furthest(reports: Sequence[LiveReport | None]) -> LiveReport | None:
    """That of the ranks that have recovered most often: one that is not of their group yet, or any more, knows less."""
    return max(filter(None, reports), key=lambda live: live.lost + live.left + live.joined, default=None)


def slowest_of(ranks: Sequence[RankRow]) -> Slowest | None:
    """The rank that the others wait for; None where none stands out.

    Ranks meet at each gradient reduction, so that one whose own work is slow makes the steps of all of them as long.
    Its own wait for data and its own passes are seen all the same, where they are measured.
    """
    steps = [(rank.step_seconds, rank.rank) for rank in ranks if rank.step_seconds]
    if len(steps) < 2:
        return None
    usual = _median(steps)
    longest, rank = _longest(steps)
    if longest >= _SLOWER * usual:
        return Slowest(rank, f"its steps take {longest / usual:.1f} times the median of all ranks")
    found = [*_by_data(ranks, usual), *_by_passes(ranks, usual)]
    return max(found, key=lambda each: each[0])[1] if found else None


def data_wait_of(ranks: Sequence[RankRow]) -> tuple[float, float] | None:
    """What the median rank waits for the data of a step, and how long its step takes; None where it hardly waits."""
    waits = [rank.data_seconds for rank in ranks if rank.data_seconds is not None]
    steps = [rank.step_seconds for rank in ranks if rank.step_seconds]
    if not waits or not steps or median_low(waits) < _NOTICED * median_low(steps):
        return None
    return median_low(waits), median_low(steps)


def throttled(pods: Sequence[PodThrottling]) -> list[PodThrottling]:
    """Those that their CPU limit stops noticeably often, the worst first."""
    found = [pod for pod in pods if pod.share >= _NOTICED]
    return sorted(found, key=lambda pod: (-pod.share, pod.pod))


def slowest_first(ranks: Sequence[RankRow]) -> list[RankRow]:
    """By step time, before all the one that the others wait for; ranks of which nothing is known last."""
    slowest = slowest_of(ranks)
    named = slowest.rank if slowest is not None else None
    return sorted(ranks, key=lambda rank: (rank.rank != named, -(rank.step_seconds or 0.0), rank.rank))


def milliseconds(seconds: float | None) -> str:
    """Such as `4.2 ms` or `1.35 s`; empty for None."""
    if seconds is None:
        return ""
    # with as few digits as three, 999.6 would be 1e+03
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"


def _by_data(ranks: Sequence[RankRow], step: float) -> list[tuple[float, Slowest]]:
    """The rank whose data comes late, with how much later; none if that is not much of a step."""
    waits = [(rank.data_seconds, rank.rank) for rank in ranks if rank.data_seconds is not None]
    if len(waits) < 2:
        return []
    wait, rank = _longest(waits)
    more = wait - _median(waits)
    reason = f"it waits {milliseconds(more)} longer for the data of a step than the median rank"
    return [(more, Slowest(rank, reason, waits_for_data=True))] if more >= _WAITS * step else []


def _by_passes(ranks: Sequence[RankRow], step: float) -> list[tuple[float, Slowest]]:
    """The same of forward and backward passes."""
    passes = [(rank.passes_seconds, rank.rank) for rank in ranks if rank.passes_seconds]
    if len(passes) < 2:
        return []
    took, rank = _longest(passes)
    usual = _median(passes)
    reason = (
        f"its own forward and backward passes take {milliseconds(took)}, those of the median rank {milliseconds(usual)}"
    )
    is_slow = took >= _SLOWER * usual and took - usual >= _WORKS * step
    return [(took - usual, Slowest(rank, reason))] if is_slow else []


def _median(found: Sequence[tuple[float, int]]) -> float:
    """That of a rank: of two, the one that is not slow."""
    return median_low(seconds for seconds, _ in found)


def _longest(found: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return max(found, key=lambda each: (each[0], -each[1]))
