"""When a silent rank is a hung rank, and which one holds up the gang.

A rank that trains is stalled once it has been silent for ten times the 99th percentile of its own step times: a
step of 50 ms and one of 5 s need no setting. What has no rhythm (compiling, loading, validating, saving) gets a
fixed allowance; a process that a signal has stopped does none of these, and gets the least. A script that does not
report its phases may validate, save or download between any two steps, so what counts there is the time without a
step, without CPU time, input and output (`activity`).

In a collective everybody waits, so all ranks go silent at once, on all nodes. The stacks tell the one that is not in
the collective, or not in the one that most are in. `accounts` brings the ranks of all nodes together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

STALL_FACTOR: Final = 10.0
OBSERVED_FACTOR: Final = 10.0
"""How much longer than others a script may be silent that is only observed, once its steps are seen."""
ENDED: Final = "ended"
"""The phase of a rank whose script has returned while its pod waits for the others."""
NAMED_RANKS: Final = 16
"""How many ranks a message describes one by one."""
_QUIET_PHASE_SECONDS: Final[dict[str, float]] = {"init": 600.0, "rendezvous": 900.0, "done": 300.0}
"""Imports; the peers' process groups (which time out by themselves after 600 s); leaving. Others: the maximum."""
_WILL_NOT_JOIN: Final = ("done", ENDED)
_FROZEN: Final = ("T", "t", "D")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the allowance, in seconds."""

    min_seconds: float = 30.0
    max_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank as its last heartbeat and its stack show it. `progress_at` is on the clock of `stalled`'s `now`."""

    rank: int
    phase: str
    step: int | None
    progress_at: float
    step_seconds_p99: float | None = None
    process_state: str | None = None
    """The kernel's letter (proc_pid_stat(5)): T is stopped by a signal, D waits for a device."""
    stopped_at: float | None = None
    """Since when each look has found it stopped by a signal."""
    observed: bool = False
    """Its script does not report itself: steps are seen, other phases may not be."""
    frame: str | None = None
    """Where the script stands: `function (file:line)`. None: there is no stack."""
    collective: str | None = None
    """The function of torch.distributed that it waits in, or `backward`, where DDP waits."""
    node: int | None = None


@dataclass(frozen=True, slots=True)
class StallReport:
    """`rank` has been silent for longer than allowed; `message` says where every rank stood."""

    rank: int
    message: str
    node: int | None = None


def stalled(ranks: Sequence[Rank], now: float, limits: Limits) -> StallReport | None:
    """The rank that holds up the gang, if one has been silent for longer than its phase allows.

    None also while every late rank waits for one that is not late, in a collective or before its first steps: that one
    may be validating, saving or preparing the data.
    """
    suspects = _suspects(ranks, now, limits)
    if not suspects:
        return None
    crowd = _crowd(ranks)
    culprit = min(suspects, key=lambda rank: _suspicion(rank, crowd))
    silent, allowed = now - culprit.progress_at, allowance(culprit, limits)
    if _is_stopped(culprit, now, limits):
        allowed = min(allowed, limits.min_seconds)
    where = "; ".join(_place(rank, now) for rank in _described(ranks, culprit))
    more = len(ranks) - NAMED_RANKS
    what = f"made no progress for {silent:.0f} s (allowed: {allowed:.0f} s)"
    if silent <= allowed:
        what = f"holds up the others, silent for {silent:.0f} s"
    if culprit.phase in _WILL_NOT_JOIN:
        what = "is done, and other ranks wait for it in a collective"
    message = f"rank {culprit.rank} {what}: {where}"
    if more > 0:
        message += f"; and {more} more ranks"
    return StallReport(culprit.rank, message, culprit.node)


def is_late(rank: Rank, now: float, limits: Limits) -> bool:
    """Whether it has been stopped, or silent for longer than its phase allows. One that has ended need do nothing."""
    silent = now - rank.progress_at
    return rank.phase != ENDED and (silent > allowance(rank, limits) or _is_stopped(rank, now, limits))


def _is_stopped(rank: Rank, now: float, limits: Limits) -> bool:
    """For so long that it is no debugger's short look at it."""
    return rank.stopped_at is not None and now - max(rank.stopped_at, rank.progress_at) > limits.min_seconds


def allowance(rank: Rank, limits: Limits) -> float:
    """How many seconds this rank may be silent where it stands."""
    trains = rank.phase == "train" and rank.step_seconds_p99 is not None
    if rank.observed and not trains:
        return limits.max_seconds
    if trains and rank.step_seconds_p99 is not None:
        least = limits.min_seconds * (OBSERVED_FACTOR if rank.observed else 1.0)
        return min(max(STALL_FACTOR * rank.step_seconds_p99, least), limits.max_seconds)
    return min(_QUIET_PHASE_SECONDS.get(rank.phase, limits.max_seconds), limits.max_seconds)


def ranks_of(
    heartbeats: Iterable[Mapping[str, Any]],
    states: Mapping[int, str | None],
    active_at: Mapping[int, float],
    node: int | None = None,
    ended: Collection[int] = (),
    stopped_at: Mapping[int, float] = MappingProxyType({}),
) -> list[Rank]:
    """The ranks to judge, from heartbeats and, by pid, the state of each process, when it was last active, and since
    when a signal has stopped it; `ended` has the processes whose script has returned.
    """
    return [
        Rank(
            rank=heartbeat["rank"],
            phase=ENDED if heartbeat["pid"] in ended else heartbeat["phase"],
            step=heartbeat["step"],
            progress_at=max(heartbeat["time"], active_at.get(heartbeat["pid"], 0.0))
            if heartbeat.get("observed") or heartbeat.get("ownLoop") or heartbeat["pid"] in ended
            else heartbeat["time"],
            observed=bool(heartbeat.get("observed")),
            step_seconds_p99=heartbeat.get("stepSecondsP99"),
            process_state=states.get(heartbeat["pid"]),
            stopped_at=stopped_at.get(heartbeat["pid"]),
            node=node,
        )
        for heartbeat in heartbeats
    ]


def may_wait(rank: Rank) -> bool:
    """Whether it may wait for another rank: in a collective, or, before its steps have a rhythm, by looking for a lock
    or a file again and again, as for data that one rank prepares. On NFS such a look is seen as D, too.
    """
    is_stopped = rank.stopped_at is not None or rank.process_state in ("T", "t")
    is_before_steps = rank.step_seconds_p99 is None and rank.phase not in _WILL_NOT_JOIN
    return rank.collective is not None or (is_before_steps and not is_stopped)


def _suspects(ranks: Sequence[Rank], now: float, limits: Limits) -> list[Rank]:
    """The late ranks that wait for no other; if all do, those that will never join them, and else all that wait."""
    late = [rank for rank in ranks if is_late(rank, now, limits)]
    if not late:
        return []
    # A stack below DistributedDataParallel or a save looks like a collective while the rank computes or writes.
    # Whether it is late is asked anew: to look for it among thousands takes longer, and for all of them minutes.
    working = [
        rank for rank in ranks if not is_late(rank, now, limits) and now - rank.progress_at <= limits.min_seconds
    ]
    if any(rank.phase != ENDED and not rank.collective for rank in working):
        late = [rank for rank in late if rank.collective or not may_wait(rank)]
    if by_themselves := [rank for rank in late if not rank.collective or rank.process_state in _FROZEN]:
        return by_themselves
    if not late:
        return []
    if gone := [rank for rank in ranks if rank.phase == ENDED]:
        return gone
    # all wait: in a collective that one of them has passed or not reached, which need not be late itself yet
    return [] if working or any(not rank.collective for rank in ranks) else list(ranks)


def _crowd(ranks: Collection[Rank]) -> tuple[str | None, str | None] | None:
    """The collective and the frame in which more than half of the ranks are; None if there is no such place."""
    places = Counter((rank.collective, rank.frame) for rank in ranks if rank.frame is not None)
    place, count = max(places.items(), key=lambda item: item[1], default=(None, 0))
    return place if 2 * count > len(ranks) else None


def _suspicion(rank: Rank, crowd: tuple[str | None, str | None] | None) -> tuple[bool, bool, int, float, int]:
    """The least is the most suspicious: stopped, not where most are, with the fewest steps, the longest silent."""
    is_with_most = rank.frame is None or crowd is None or crowd == (rank.collective, rank.frame)
    step = -1 if rank.step is None else rank.step
    return rank.process_state not in _FROZEN, is_with_most, step, rank.progress_at, rank.rank


def _described(ranks: Sequence[Rank], culprit: Rank) -> list[Rank]:
    """The ranks that a message describes, the culprit always among them."""
    ordered = sorted(ranks, key=lambda rank: (rank is not culprit, rank.rank))[:NAMED_RANKS]
    return sorted(ordered, key=lambda rank: rank.rank)


def _place(rank: Rank, now: float) -> str:
    step = "before its first step" if rank.step is None else f"after step {rank.step}"
    if rank.phase == "script":
        step = "without a step that was seen"
    extra = {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", stuck in the kernel"}
    where = extra.get(rank.process_state or "", "")
    waits = f", waiting in {rank.collective}" if rank.collective else ""
    return f"rank {rank.rank} in {rank.phase} {step}, silent for {now - rank.progress_at:.0f} s{waits}{where}"
