"""Why a pod ended: the one cause among all that its ranks report.

When one rank dies the others die of it: they lose a connection, or torchrun signals them. So what a rank reports is
weighed before it is believed: the earliest failure that is not such a consequence is the cause.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_trainer.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED
from ddp_trainer.outcomes import classify_exit, tells_of_a_lost_peer
from ddp_trainer.status import progress


@dataclass(frozen=True, slots=True)
class Ending:
    """All that is known once no rank of the pod runs any more. Local ranks index `stderr`."""

    wall: float
    procs: int
    outcomes: Sequence[Mapping[str, Any]] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    beats: Sequence[Mapping[str, Any]] = ()
    started: int = 0
    """Ranks that ever ran."""
    stderr: Mapping[int, Sequence[str]] = field(default_factory=dict)
    agent_code: int = 0
    rendezvous_error: str | None = None
    stop_requested: bool = False
    killed: frozenset[int] = frozenset()
    """pids that the launcher killed itself: at the end of the grace period, or as survivors of a failure."""
    stall: tuple[int, str] | None = None
    """The rank that made no progress and the account of it."""
    oom_killed: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """What the pod ended of; `exit_code` is the launcher's."""

    exit_code: int
    reason: str
    message: str
    rank: int | None = None
    local_rank: int | None = None
    signal: str | None = None
    exception: str | None = None
    traceback: str | None = None
    time: float | None = None


def find_cause(ending: Ending) -> Cause:
    """The one cause that is reported for this pod."""
    if ending.stall is not None:
        rank, account = ending.stall
        return Cause(EXIT_FAILED, "Stalled", account, rank=rank, local_rank=_local_rank(ending, rank))
    good = [outcome for outcome in ending.outcomes if outcome["exitCode"] in (EXIT_OK, EXIT_PREEMPTED)]
    if len(good) == ending.procs or (
        ending.agent_code == EXIT_OK and not ending.failures and len(good) == len(ending.outcomes)
    ):
        preempted = any(outcome["exitCode"] == EXIT_PREEMPTED for outcome in good)
        return (
            _preempted(ending) if preempted or (ending.stop_requested and not _finished(ending)) else _completed(ending)
        )
    suspects = sorted(_suspects(ending), key=lambda suspect: suspect.order)
    cause = suspects[0] if suspects else None
    if ending.stop_requested and (cause is None or cause.is_consequence):
        return _preempted(ending)
    if cause is not None and not (cause.is_consequence and ending.rendezvous_error):
        return cause.cause
    return _without_a_rank(ending)


def _completed(ending: Ending) -> Cause:
    return Cause(EXIT_OK, "Completed", f"all ranks of this pod finished{_after(ending.beats, None)}")


def _preempted(ending: Ending) -> Cause:
    snapshot = progress(ending.beats)["snapshot"]
    saved = f"the snapshot of step {snapshot['step']} is saved" if snapshot else "there is no snapshot"
    late = f"; {len(ending.killed)} ranks did not stop in time and were killed" if ending.killed else ""
    if not ending.started:
        return Cause(EXIT_PREEMPTED, "Preempted", "stopped by SIGTERM before any rank had started")
    return Cause(EXIT_PREEMPTED, "Preempted", f"stopped by SIGTERM{_after(ending.beats, None)}; {saved}{late}")


def _without_a_rank(ending: Ending) -> Cause:
    """torchrun itself failed."""
    if ending.rendezvous_error and ending.started:
        return Cause(EXIT_FAILED, "PeerLost", f"the rendezvous of the nodes broke: {ending.rendezvous_error}")
    if ending.rendezvous_error:
        return Cause(EXIT_FAILED, "RendezvousFailed", f"the nodes did not find each other: {ending.rendezvous_error}")
    if ending.agent_code < 0:
        name = _signal_name(-ending.agent_code)
        reason = "OutOfMemory" if ending.oom_killed else "WorkerKilled"
        return Cause(EXIT_FAILED, reason, f"torchrun was killed by {name}{_after(ending.beats, None)}", signal=name)
    return Cause(
        EXIT_FAILED, "WorkerException", f"torchrun exited with code {ending.agent_code}; the pod's log says why"
    )


@dataclass(frozen=True, slots=True)
class _Suspect:
    cause: Cause
    is_consequence: bool
    time: float
    seen: int

    @property
    def order(self) -> tuple[bool, float, int]:
        return self.is_consequence, self.time, self.seen


def _suspects(ending: Ending) -> list[_Suspect]:
    recorded = {outcome["rank"]: outcome for outcome in ending.outcomes}
    suspects = [
        _Suspect(_by_record(outcome, ending), outcome["reason"] == "PeerLost", outcome["time"], 0)
        for outcome in recorded.values()
        if outcome["exitCode"] not in (EXIT_OK, EXIT_PREEMPTED)
    ]
    for seen, failure in enumerate(ending.failures):
        if failure["rank"] in recorded and recorded[failure["rank"]]["pid"] == failure["pid"]:
            continue
        cause = _by_exit_code(failure, ending)
        consequence = cause.reason == "PeerLost" or cause.signal == "SIGTERM" or failure["pid"] in ending.killed
        suspects.append(_Suspect(cause, consequence, failure["time"], seen))
    return suspects


def _by_record(outcome: Mapping[str, Any], ending: Ending) -> Cause:
    rank, name, text = outcome["rank"], outcome["exception"], outcome["message"]
    after = _after(ending.beats, rank)
    if outcome["reason"] in ("UserError", "Fenced") and name is not None:
        message = f"rank {rank}: {text}"
    elif name is not None:
        message = f"rank {rank} raised {name}{after}: {text}"
    else:
        message = f"rank {rank} {text}{after}{_last_words(ending, outcome['localRank'])}"
    return Cause(
        exit_code=outcome["exitCode"],
        reason=outcome["reason"],
        message=message,
        rank=rank,
        local_rank=outcome["localRank"],
        exception=f"{name}: {text}" if name is not None else None,
        traceback=outcome["traceback"],
        time=outcome["time"],
    )


def _by_exit_code(failure: Mapping[str, Any], ending: Ending) -> Cause:
    """A rank that left no record: a signal, `os._exit`, or a crash in C."""
    rank, local_rank, code = failure["rank"], failure["localRank"], failure["exitCode"]
    after, words = _after(ending.beats, rank), _last_words(ending, local_rank)
    if code >= 0:
        exit_code, reason = classify_exit(code)
        message, name = f"rank {rank} exited with code {code}{after} without a Python exception{words}", None
    else:
        name, exit_code, reason = _signal_name(-code), EXIT_FAILED, "WorkerKilled"
        message = f"rank {rank} was killed by {name}{after}"
        if name == "SIGKILL" and ending.oom_killed:
            reason, message = (
                "OutOfMemory",
                f"{message}: the kernel ended it because the container's memory was used up",
            )
        elif name == "SIGABRT" and tells_of_a_lost_peer("\n".join(ending.stderr.get(local_rank, ()))):
            reason = "PeerLost"
        if name not in ("SIGKILL", "SIGTERM"):
            message += words
    return Cause(exit_code, reason, message, rank=rank, local_rank=local_rank, signal=name, time=failure["time"])


def _local_rank(ending: Ending, rank: int) -> int | None:
    return next((beat["localRank"] for beat in ending.beats if beat["rank"] == rank), None)


def _after(beats: Sequence[Mapping[str, Any]], rank: int | None) -> str:
    """How far a rank was, or the pod (None), as the end of a sentence; nothing where no step is known."""
    steps = [beat["step"] for beat in beats if rank is None or beat["rank"] == rank]
    if not steps:
        return ""
    return " before its first step" if not steps[0] else f" after step {steps[0]}"


def _finished(ending: Ending) -> bool:
    """Whether training had come to its end when it was asked to stop."""
    return bool(ending.beats) and all(
        beat["phase"] == "done" or (beat["totalSteps"] is not None and (beat["step"] or 0) >= beat["totalSteps"])
        for beat in ending.beats
    )


def _last_words(ending: Ending, local_rank: int) -> str:
    lines = ending.stderr.get(local_rank, ())
    return "; its last lines on stderr: " + " | ".join(lines) if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
