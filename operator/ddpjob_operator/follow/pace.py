"""What a running job's ranks do, what slows them, and what to do about it; no more than is measured.

A pure function of what the ranks report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.core.ledger.ranks import (
    PodThrottling,
    RankRow,
    Reports,
    Slowest,
    data_wait_of,
    milliseconds,
    slowest_of,
    throttled,
)
from ddpjob_operator.core.values.trainer_report import LiveReport
from ddpjob_operator.local.observed import seconds_in_words

_SILENT_SECONDS = 10.0
_SILENT_STEPS = 10
"""A rank that makes no progress for longer than both is named."""
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Lines of each kind; none where there is nothing to say."""

    ranks: tuple[str, ...] = ()
    slowed_by: tuple[str, ...] = ()
    """What slows more than one rank, or a pod."""
    todo: tuple[str, ...] = ()


def pace_of(reports: Reports, now: datetime) -> Pace:
    """What the ranks of a running job say of its pace, at this moment."""
    slowest, wait = slowest_of(reports.ranks), data_wait_of(reports.ranks)
    stopped = throttled(reports.throttling)
    ranks = (
        _doing(reports.ranks),
        _recovered(reports.live),
        _named(reports.ranks, slowest),
        *_silent(reports.ranks, now),
        reports.note,
    )
    return Pace(
        ranks=tuple(filter(None, ranks)),
        slowed_by=(*_data(wait), *_some([_throttled(pod) for pod in stopped], "pods")),
        todo=tuple(_todo(reports.ranks, slowest, is_slowed_by_data=wait is not None, stopped=stopped)),
    )


def _doing(ranks: Sequence[RankRow]) -> str:
    """Such as `3 ranks in train, step 119 to 120; 1 rank in validate, step 119`."""
    phases: dict[str, list[int]] = {}
    for rank in ranks:
        phases.setdefault(rank.phase, []).append(-1 if rank.step is None else rank.step)
    return "; ".join(
        f"{_count(len(steps))} in {phase.replace('_', ' ') or 'no phase yet'}{_steps(steps)}"
        for phase, steps in phases.items()
    )


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _steps(steps: Sequence[int]) -> str:
    low, high = min(steps), max(steps)
    if high < 0:
        return ""
    return f", step {high}" if low == high else f", step {max(low, 0)} to {high}"


def _recovered(live: LiveReport | None) -> str:
    """Such as `live recovery: 3 ranks of 4 train; 1 lost, 0 left, 0 joined, the last in 0.21 s; 1 step dropped`."""
    if live is None:
        return ""
    size = f"live recovery: {_count(live.ranks)} of {live.world_size} {'trains' if live.ranks == 1 else 'train'}"
    if live.last_seconds is None:
        return size
    counts = f"{live.lost} lost, {live.left} left, {live.joined} joined, the last in {live.last_seconds:.2f} s"
    return f"{size}; {counts}; {live.dropped_steps} step{'' if live.dropped_steps == 1 else 's'} dropped"


def _named(ranks: Sequence[RankRow], slowest: Slowest | None) -> str:
    """The slowest rank; else what can be said of all of them."""
    if slowest is not None:
        rank = next(rank for rank in ranks if rank.rank == slowest.rank)
        return f"the others wait for {_place(rank)}: {slowest.reason}"
    timed = [rank for rank in ranks if rank.step_seconds]
    if len(timed) < 2:
        return ""
    if any(rank.passes_seconds is not None for rank in timed):
        return "no rank stands out"
    equal = "their steps take equally long, as those of ranks that meet in each step do, whichever of them is slow"
    if any(rank.data_seconds is not None for rank in timed):
        return f"no rank waits longer for its data; {equal}"
    return equal


def _silent(ranks: Sequence[RankRow], now: datetime) -> list[str]:
    """Ranks without progress for long, the longest first."""
    silent = []
    for rank in ranks:
        seconds = (now - rank.last_progress).total_seconds() if rank.last_progress is not None else 0.0
        if rank.phase != "done" and seconds > max(_SILENT_SECONDS, _SILENT_STEPS * (rank.step_seconds or 0.0)):
            silent.append((seconds, rank))
    silent.sort(key=lambda each: (-each[0], each[1].rank))
    lines = [f"no progress for {seconds_in_words(seconds)}: {_place(rank)}, {_at(rank)}" for seconds, rank in silent]
    return _some(lines, "ranks")


def _at(rank: RankRow) -> str:
    return rank.phase.replace("_", " ") + ("" if rank.step is None else f" after step {rank.step}")


def _data(wait: tuple[float, float] | None) -> list[str]:
    if wait is None:
        return []
    seconds, step = wait
    return [f"data: the median rank waits {milliseconds(seconds)} for it in a step of {milliseconds(step)}"]


def _throttled(pod: PodThrottling) -> str:
    found = pod.found
    return (
        f"CPU limit: {_pod(pod.pod, pod.node)} ran into it in {pod.share:.0%} of its scheduling periods of the last "
        f"{seconds_in_words(found.seconds)}, and was stopped for {found.throttled_seconds:.1f} s, added up over CPUs"
    )


def _todo(
    ranks: Sequence[RankRow], slowest: Slowest | None, *, is_slowed_by_data: bool, stopped: Sequence[PodThrottling]
) -> list[str]:
    lines = []
    if is_slowed_by_data or (slowest is not None and slowest.waits_for_data):
        lines.append(
            "Load data with more processes (num_workers of the DataLoader, --workers of the built-in loop), or from a "
            "faster volume."
        )
    if stopped:
        lines.append("Raise spec.resources.limits.cpu, or start fewer processes below it (procsPerNode, --workers).")
    rank = next((rank for rank in ranks if slowest is not None and rank.rank == slowest.rank), None)
    is_explained = slowest is None or slowest.waits_for_data or any(pod.pod == rank.pod for pod in stopped if rank)
    if rank is not None and not is_explained:
        where = f"the node {rank.node}" if rank.node else f"the machine of rank {rank.rank}"
        lines.append(f"Look for what else uses {where}, and for its clock speed; then for what the script does there.")
    return lines


def _place(rank: RankRow) -> str:
    return f"rank {rank.rank}" + (f" of {_pod(rank.pod, rank.node)}" if rank.pod else "")


def _pod(pod: str, node: str) -> str:
    return f"pod {pod} on node {node}" if node else f"pod {pod}"


def _some(lines: Sequence[str], of: str) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _MOST_NAMED
    return [*lines[:_MOST_NAMED], *([f"and {more} more {of}"] if more > 0 else [])]
