"""When a silent rank is a hung rank.

A rank that trains is stalled once it has been silent for ten times the 99th percentile of its own step times: a
step of 50 ms and one of 5 s need no setting. What has no rhythm (compiling, loading, validating, saving) gets a
fixed allowance. A script that does not report itself may validate or save between any two steps, so its rank is
stalled only after the longest allowance without a step, without CPU time and without output (`activity`). The whole
state is in the heartbeats: a new attempt starts without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

STALL_FACTOR: Final = 10.0
_QUIET_PHASE_SECONDS: Final[dict[str, float]] = {"init": 600.0, "rendezvous": 900.0, "done": 300.0}
"""Imports; the peers' process groups (which time out by themselves after 600 s); leaving. Others: the maximum."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the allowance, in seconds."""

    min_seconds: float = 30.0
    max_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One living rank as its last heartbeat tells it. `progress_at` is on the clock of `stalled`'s `now`."""

    rank: int
    phase: str
    step: int | None
    progress_at: float
    step_seconds_p99: float | None = None
    process_state: str | None = None
    """The kernel's letter (proc_pid_stat(5)): T is stopped by a signal, D waits for a device."""
    observed: bool = False
    """Its script does not report itself: steps are seen, other phases may not be."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """`rank` has been silent for longer than allowed; `message` says where every rank stood."""

    rank: int
    silent_seconds: float
    allowed_seconds: float
    message: str


def stalled(ranks: Sequence[Rank], now: float, limits: Limits) -> StallReport | None:
    """The rank that holds up this pod, if one has been silent for longer than its phase allows.

    In a collective everybody waits, so several ranks go silent at once. The one to name is the one that is not
    merely waiting: stopped or stuck in the kernel, else the one with the fewest steps, else the longest silent.
    """
    if not any(now - rank.progress_at > allowance(rank, limits) for rank in ranks):
        return None
    culprit = min(ranks, key=_suspicion)
    silent = now - culprit.progress_at
    allowed = allowance(culprit, limits)
    if silent <= allowed:
        # it is late, yet within what its own phase allows: name one that is not
        culprit = min((r for r in ranks if now - r.progress_at > allowance(r, limits)), key=_suspicion)
        silent, allowed = now - culprit.progress_at, allowance(culprit, limits)
    where = "; ".join(_place(rank, now) for rank in sorted(ranks, key=lambda rank: rank.rank))
    message = f"rank {culprit.rank} made no progress for {silent:.0f} s (allowed: {allowed:.0f} s): {where}"
    return StallReport(culprit.rank, silent, allowed, message)


def allowance(rank: Rank, limits: Limits) -> float:
    """How many seconds this rank may be silent where it stands."""
    if rank.observed:
        return limits.max_seconds
    if rank.phase == "train" and rank.step_seconds_p99 is not None:
        return min(max(STALL_FACTOR * rank.step_seconds_p99, limits.min_seconds), limits.max_seconds)
    return min(_QUIET_PHASE_SECONDS.get(rank.phase, limits.max_seconds), limits.max_seconds)


def ranks_of(
    heartbeats: Iterable[Mapping[str, Any]], states: Mapping[int, str | None], active_at: Mapping[int, float]
) -> list[Rank]:
    """The ranks to judge, from heartbeats and, by pid, the state of each process and when it was last active."""
    return [
        Rank(
            rank=heartbeat["rank"],
            phase=heartbeat["phase"],
            step=heartbeat["step"],
            progress_at=max(heartbeat["time"], active_at.get(heartbeat["pid"], 0.0))
            if heartbeat.get("observed")
            else heartbeat["time"],
            observed=bool(heartbeat.get("observed")),
            step_seconds_p99=heartbeat.get("stepSecondsP99"),
            process_state=states.get(heartbeat["pid"]),
        )
        for heartbeat in heartbeats
    ]


def _suspicion(rank: Rank) -> tuple[bool, int, float]:
    frozen = rank.process_state in ("T", "t", "D")
    return not frozen, -1 if rank.step is None else rank.step, rank.progress_at


def _place(rank: Rank, now: float) -> str:
    step = "before its first step" if rank.step is None else f"after step {rank.step}"
    if rank.phase == "script":
        step = "without a step that was seen"
    extra = {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", stuck in the kernel"}
    where = extra.get(rank.process_state or "", "")
    return f"rank {rank.rank} in {rank.phase} {step}, silent for {now - rank.progress_at:.0f} s{where}"
