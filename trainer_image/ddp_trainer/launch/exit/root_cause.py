"""Why a pod ended: the one cause among all that its ranks report.

When one rank dies the others die of it: they lose a connection, or torchrun signals them. So what a rank reports is
checked first: the earliest failure that is not such a consequence is the cause. Among consequences a lost connection
says more than the signal that torchrun sent.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from ddp_trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER
from ddp_trainer.contract.messages import crash_lost_peer, timed_out
from ddp_trainer.contract.outcomes import classify_exit, signal_of
from ddp_trainer.launch.status.pod_state import progress

EXCLUDED: Final = "ddp_trainer.live.deciding.Excluded"
"""The exception of a rank that the others went on without, such as one whose pod has lost another rank."""


_KILLED: Final = (EXIT_FAILED, "WorkerKilled")
"""Exit code and reason for 143 from a script that nobody has asked to stop."""


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """All that is known once no rank of the pod runs any more. Local ranks index `stderr`."""

    wall: float
    procs: int
    """Ranks of this pod."""
    nodes: int = 1
    """Of the gang; the ranks of the others are not in this evidence."""
    live: bool = False
    """The ranks of the gang recover live: those of other pods may go on without this one."""
    outcomes: Sequence[Mapping[str, Any]] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    heartbeats: Sequence[Mapping[str, Any]] = ()
    started: int = 0
    """Ranks that ever ran."""
    stderr: Mapping[int, Sequence[str]] = field(default_factory=dict)
    agent_code: int = 0
    rendezvous_error: str | None = None
    torch_error: str | None = None
    """What torchrun could not be imported for."""
    stop_requested: bool = False
    stop_time: float | None = None
    """Epoch seconds of that, if known."""
    killed: frozenset[int] = frozenset()
    """pids that the launcher killed itself: at the end of the grace period, or as survivors of a failure."""
    stall: tuple[int, str] | None = None
    """The rank that made no progress and the account of it."""
    peer_stall: str | None = None
    """The account of a rank of another node that made no progress, or of a node that does not answer."""
    oom_killed: bool = False
    memory_problem: str | None = None
    """That the memory-backed run directory is full, in words (`run_memory`)."""


@dataclass(frozen=True, slots=True)
class ExitCause:
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
    cut: str | None = None
    """What ranks that succeeded had left at work, and was ended before it was done."""


def find_cause(evidence: ExitEvidence) -> ExitCause:
    """The one cause that is reported for this pod."""
    cause = _find_cause(evidence)
    if evidence.memory_problem is not None and (cause.reason == "DiskFull" or cause.signal == "SIGBUS"):
        return replace(cause, reason="DiskFull", message=f"{cause.message}; {evidence.memory_problem}")
    return cause


def _find_cause(evidence: ExitEvidence) -> ExitCause:
    is_unasked = bool(_unasked(evidence)) and evidence.nodes == 1  # of several nodes all ranks may have agreed to stop
    if evidence.stall is not None and not is_unasked:
        rank, account = evidence.stall
        return ExitCause(EXIT_FAILED, "Stalled", account, rank=rank, local_rank=_local_rank(evidence, rank))
    if evidence.peer_stall is not None:
        return ExitCause(EXIT_FAILED, "PeerLost", evidence.peer_stall)
    good = [outcome for outcome in evidence.outcomes if outcome["exitCode"] in (EXIT_OK, EXIT_PREEMPTED)]
    is_good = len(good) == evidence.procs or (
        evidence.agent_code == EXIT_OK and not evidence.failures and len(good) == len(evidence.outcomes)
    )
    if is_good and not is_unasked:
        preempted = any(outcome["exitCode"] == EXIT_PREEMPTED for outcome in good)
        return (
            _preempted(evidence)
            if preempted or (evidence.stop_requested and not _finished(evidence, good))
            else _completed(evidence)
        )
    suspects = sorted(_suspects(evidence), key=lambda suspect: suspect.order)
    cause = suspects[0] if suspects else None
    if evidence.stop_requested and (cause is None or cause.is_consequence):
        return _preempted(evidence)
    if cause is not None and not (cause.is_consequence and evidence.rendezvous_error):
        return (_absent(cause, suspects) if evidence.nodes == 1 else None) or cause.cause
    return _without_a_rank(evidence)


def _absent(cause: _Suspect, suspects: Sequence[_Suspect]) -> ExitCause | None:
    """The cause where only one rank of the gang did not time out: it was not in the collective of the others.

    Of a gang of several nodes this does not follow: the rank may have waited too, for one of another node.
    """
    stopped = [suspect.cause for suspect in suspects if suspect.kind is _Kind.STOPPED]
    if cause.kind is not _Kind.PEER_LOST or len(stopped) != 1 or not timed_out(cause.cause.message):
        return None
    rank = stopped[0].rank
    message = f"rank {rank} did not join a collective in time; {cause.cause.message}"
    return replace(cause.cause, message=message, rank=rank, local_rank=stopped[0].local_rank)


def _unasked(evidence: ExitEvidence) -> Sequence[Mapping[str, Any]]:
    """Records of ranks whose script has chosen exit code 143, though no SIGTERM came to this pod, and no rank noted one
    or agreed to stop: the script passes on how a program has ended. To restart it for free would have no end.
    """
    preempted = [outcome for outcome in evidence.outcomes if outcome["exitCode"] == EXIT_PREEMPTED]
    agreed = any(outcome["message"] is None for outcome in preempted)
    return () if evidence.stop_requested or agreed else preempted


def _completed(evidence: ExitEvidence) -> ExitCause:
    cuts = [f"rank {outcome['rank']}: {outcome['cut']}" for outcome in evidence.outcomes if outcome.get("cut")]
    message = f"all ranks of this pod finished{_after(evidence.heartbeats, None)}"
    if cuts:
        message += f"; ended before it was done: {'; '.join(cuts)}"
    return ExitCause(EXIT_OK, "Completed", message, cut="; ".join(cuts) or None)


def _preempted(evidence: ExitEvidence) -> ExitCause:
    snapshot = progress(evidence.heartbeats)["snapshot"]
    saved = "; there is no snapshot"
    if snapshot:
        saved = f"; the snapshot of step {snapshot['step']} is saved"
    elif evidence.heartbeats and evidence.heartbeats[0]["rank"] != 0:
        saved = ""  # only the pod of rank 0 knows of those before
    late = f"; {len(evidence.killed)} ranks did not stop in time and were killed" if evidence.killed else ""
    has_left = _has_left(evidence)
    reason = "Left" if has_left else "Preempted"
    if not evidence.started:
        return ExitCause(EXIT_PREEMPTED, reason, "stopped by SIGTERM before any rank had started")
    rest = "; the other ranks go on without this pod" if has_left else saved
    message = f"stopped by SIGTERM{_after(evidence.heartbeats, None)}{rest}{late}"
    return ExitCause(EXIT_PREEMPTED, reason, message)


def _has_left(evidence: ExitEvidence) -> bool:
    """Whether the other ranks may go on without this pod. Where all ranks have agreed to stop, each has that on record
    once it has saved; one that SIGTERM, or the end of the grace period, has ended before counts as alone.
    """
    reasons = {outcome["reason"] for outcome in evidence.outcomes}
    return "Left" in reasons or (evidence.live and "Preempted" not in reasons)


def _without_a_rank(evidence: ExitEvidence) -> ExitCause:
    """torchrun itself failed."""
    if evidence.rendezvous_error and evidence.started:
        return ExitCause(EXIT_FAILED, "PeerLost", f"the rendezvous of the nodes broke: {evidence.rendezvous_error}")
    if evidence.rendezvous_error:
        return ExitCause(
            EXIT_FAILED, "RendezvousFailed", f"the nodes did not find each other: {evidence.rendezvous_error}"
        )
    if evidence.torch_error:
        return ExitCause(EXIT_USER, "ImportError", f"torch cannot be imported: {evidence.torch_error}")
    if evidence.agent_code < 0:
        name = _signal_name(-evidence.agent_code)
        reason = "OutOfMemory" if evidence.oom_killed else "WorkerKilled"
        return ExitCause(
            EXIT_FAILED, reason, f"torchrun was killed by {name}{_after(evidence.heartbeats, None)}", signal=name
        )
    return ExitCause(
        EXIT_FAILED, "WorkerException", f"torchrun exited with code {evidence.agent_code}; the pod's log says why"
    )


class _Kind(IntEnum):
    """How likely a failure is the cause: the lower, the likelier."""

    OWN = 0
    UNASKED = 1
    """Exit code 143, although nobody has asked for it. An error of another rank says more."""
    PEER_LOST = 2
    STOPPED = 3
    """By torchrun or by the launcher, after another rank had failed."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    cause: ExitCause
    kind: _Kind
    time: float
    seen: int

    @property
    def is_consequence(self) -> bool:
        return self.kind in (_Kind.PEER_LOST, _Kind.STOPPED)

    @property
    def order(self) -> tuple[int, float, int]:
        """torchrun's times are whole seconds, a record's are not: they only order failures of one kind."""
        return self.kind, self.time, self.seen


def _suspects(evidence: ExitEvidence) -> list[_Suspect]:
    recorded = {outcome["rank"]: outcome for outcome in evidence.outcomes}
    suspects = [_Suspect(_by_record(one, evidence), _Kind.UNASKED, one["time"], 0) for one in _unasked(evidence)]
    for outcome in recorded.values():
        if outcome["exitCode"] not in (EXIT_OK, EXIT_PREEMPTED):
            cause = _by_record(outcome, evidence)
            is_consequence = cause.reason == "PeerLost" or outcome["exception"] == EXCLUDED
            kind = _Kind.PEER_LOST if is_consequence else _Kind.OWN
            suspects.append(_Suspect(cause, kind, outcome["time"], 0))
    for seen, failure in enumerate(evidence.failures):
        if failure["rank"] in recorded and recorded[failure["rank"]]["pid"] == failure["pid"]:
            continue
        cause = _by_exit_code(failure, evidence)
        kind = _Kind.PEER_LOST if cause.reason == "PeerLost" else _Kind.OWN
        if failure["exitCode"] == -signal.SIGTERM or failure["pid"] in evidence.killed:
            kind = _Kind.STOPPED
        suspects.append(_Suspect(cause, kind, failure["time"], seen))
    return suspects


def _by_record(outcome: Mapping[str, Any], evidence: ExitEvidence) -> ExitCause:
    rank, local_rank = outcome["rank"], outcome["localRank"]
    exit_code, reason = outcome["exitCode"], outcome["reason"]
    if exit_code == EXIT_PREEMPTED:
        exit_code, reason = _KILLED
    name, text = outcome["exception"], outcome["message"]
    after = _after(evidence.heartbeats, rank)
    if reason in ("UserError", "Fenced", "LossNotFinite", "LiveRecoveryFailed") and name is not None:
        message = f"rank {rank}: {text}"
    elif name is not None:
        message = f"rank {rank} raised {name}{after}"
        if text != name.rpartition(".")[2]:  # which an exception without a message has in its place
            message += f": {text}"
    elif not text.startswith("exited with code"):
        message = f"rank {rank} exited{after}: {text}"
    else:
        # the script caught what happened, and exited
        message = f"rank {rank} {text}{_passed_on(outcome['exitCode'])}{after}{_stderr_tail(evidence, local_rank)}"
    if name is None and reason == "WorkerException" and crash_lost_peer(evidence.stderr.get(local_rank, ())):
        reason = "PeerLost"
    if reason == "PeerLost":
        message += _finished_before(evidence)
    return ExitCause(
        exit_code=exit_code,
        reason=reason,
        message=message,
        rank=rank,
        local_rank=local_rank,
        signal=signal_of(outcome["exitCode"]) if name is None else None,
        exception=f"{name}: {text}" if name is not None else None,
        traceback=outcome["traceback"],
        time=outcome["time"],
    )


def _by_exit_code(failure: Mapping[str, Any], evidence: ExitEvidence) -> ExitCause:
    """A rank that left no record: a signal, `os._exit`, or a crash in C."""
    rank, local_rank, code = failure["rank"], failure["localRank"], failure["exitCode"]
    after, tail = _after(evidence.heartbeats, rank), _stderr_tail(evidence, local_rank)
    if code >= 0:
        (exit_code, reason), name = classify_exit(code), signal_of(code)
        if code == EXIT_PREEMPTED and evidence.nodes == 1 and not evidence.stop_requested:
            exit_code, reason = _KILLED
        message = f"rank {rank} exited with code {code}{_passed_on(code)}{after} without a Python exception{tail}"
    else:
        name, exit_code, reason = _signal_name(-code), EXIT_FAILED, "WorkerKilled"
        by = " by the launcher, since it did not leave in time" if failure["pid"] in evidence.killed else ""
        message = f"rank {rank} was killed by {name}{by}{after}"
        if name == "SIGKILL" and evidence.oom_killed:
            reason, message = (
                "OutOfMemory",
                f"{message}: the kernel ended it because the container's memory was used up",
            )
        if name not in ("SIGKILL", "SIGTERM"):
            message += tail
    aborted = name == "SIGABRT" or reason == "WorkerException"
    if aborted and crash_lost_peer(evidence.stderr.get(local_rank, ())):
        reason = "PeerLost"
        message += _finished_before(evidence)
    return ExitCause(exit_code, reason, message, rank=rank, local_rank=local_rank, signal=name, time=failure["time"])


def _passed_on(code: int) -> str:
    name = signal_of(code)
    if name is None:
        return ""
    base = "128 +" if code == 128 + signal.Signals[name] else "256 -"
    return f" ({base} {name}, as for a program that the signal ended)"


def _finished_before(evidence: ExitEvidence) -> str:
    """Ranks of this pod whose script had returned, which others may have waited for."""
    done = [outcome["rank"] for outcome in evidence.outcomes if outcome["exitCode"] == EXIT_OK]
    return "".join(f"; rank {rank} had already finished its script" for rank in done[:1])


def _local_rank(evidence: ExitEvidence, rank: int) -> int | None:
    return next((heartbeat["localRank"] for heartbeat in evidence.heartbeats if heartbeat["rank"] == rank), None)


def _after(heartbeats: Sequence[Mapping[str, Any]], rank: int | None) -> str:
    """How far a rank was, or the pod (None), as the end of a sentence; nothing where no step is known."""
    known = [heartbeat for heartbeat in heartbeats if rank is None or heartbeat["rank"] == rank]
    steps = [heartbeat["step"] for heartbeat in known if heartbeat["phase"] != "script"]
    if not steps:
        return ""
    return " before its first step" if not steps[0] else f" after step {steps[0]}"


def _finished(evidence: ExitEvidence, good: Sequence[Mapping[str, Any]]) -> bool:
    """Whether training had come to its end when it was asked to stop."""
    if len(good) == evidence.procs and all(outcome["time"] < (evidence.stop_time or 0.0) for outcome in good):
        return True
    # A script that is only observed is done whenever it exits with 0, as one may from its own handler of SIGTERM.
    return bool(evidence.heartbeats) and all(
        (heartbeat["phase"] == "done" and not heartbeat.get("observed"))
        or 0 < (heartbeat["totalSteps"] or 0) <= (heartbeat["step"] or 0)
        for heartbeat in evidence.heartbeats
    )


def _stderr_tail(evidence: ExitEvidence, local_rank: int) -> str:
    lines = evidence.stderr.get(local_rank, ())
    return "; its last lines on stderr: " + " | ".join(lines) if lines else "; it printed nothing on stderr"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
