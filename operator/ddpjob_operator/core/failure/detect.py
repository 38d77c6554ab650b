"""From how pods ended to what went wrong: every failure of an attempt, and the first cause among them.

When one rank dies, every other one soon reports that its peer went away. Those reports are consequences: they only
count when no cause shows up within `SETTLE_SECONDS`, the time that the kubelet takes to report a pod that ended at
the same moment. It counts from when the end was seen: a busy kubelet reports all ends late, and a node may have another
clock.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from ddpjob_operator.api.status import SnapshotStatus
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.core.values.trainer_report import TerminationReport, read_termination

SETTLE_SECONDS = 3.0
LOST_PEER_SECONDS = 6.0
"""The same where all that is known is a lost peer: that rank may be done, and its pod is about to say so."""

EXIT_USER = 64
EXIT_FENCED = 77
EXIT_PREEMPTED = 143
_IN_ORDER = (EXIT_USER, EXIT_FENCED, EXIT_PREEMPTED)
"""Exit codes that the launcher chooses."""

LOG_LINE_LIMIT = 500
"""Characters of what a container said that go into a message."""

CONSEQUENCES = ("PeerLost", "RendezvousFailed")
PREEMPTED = "Preempted"
LEFT = "Left"
"""Live recovery: the ranks of the pod were asked to stop, and the others go on without them."""
TRACES_OF_A_STOP = (PREEMPTED, LEFT, "WorkerKilled", *CONSEQUENCES)
"""What a pod says of its end when the kubelet ended it: a deletion or an eviction explains these, and nothing else."""

_FENCED = re.compile(r"attempt \d+ \(uid ([^)]+)\) is fenced: attempt (\d{1,6}) \(uid \1\) owns")
STATUS_RESTORED = "StatusRestored"

_TIMED_OUT = re.compile(
    r"timed out waiting|collective operation timeout|socket timeout|: operation timed out!", re.IGNORECASE
)

_OVER_ITS_LIMIT = re.compile(
    r"ephemeral storage limit|ephemeral local storage usage exceeds|emptydir volume", re.IGNORECASE
)
"""What the kubelet says of a pod that it evicts for what this has written itself; its node has room."""

OUT_OF_RESOURCE = "OutOfResource"
NODE_LOST = "NodeLost"
NODE_REBOOTED = "NodeRebooted"
NODE_TAINTED = "NodeTainted"
DEVICE_TAINTED = "DeviceTainted"
NOT_READMITTED = ("UnexpectedAdmissionError", "TopologyAffinityError")
"""The kubelet's reasons, after it has started again, for the end of a pod that ran: a device plugin has not registered
yet (kubernetes/kubernetes#125579), or what the pod has does not fit the NUMA nodes by a new computation (#123859). Also
for a pod that it refuses at first.
"""
_STATUS_UNKNOWN = "ContainerStatusUnknown"
_FORGOTTEN_BY_RUNTIME = ("Unknown", _STATUS_UNKNOWN)
"""The kubelet's reasons for the end of a container that its runtime does not know any more, after a reboot. A kubelet
also removes the containers of a pod that it evicts, or that is deleted, often before it has read how they ended
(kubernetes/kubernetes#122160): ContainerStatusUnknown, too.
"""
_ENDED_BY_KUBELET = ("Evicted", "Preempting", "Terminated")

DELETED_FOR_TAINT = "DeletionByTaintManager"
DISRUPTED = "Disrupted"
_DISRUPTED = {
    "PreemptionByScheduler": PREEMPTED,
    "DeletionByPodGC": "NodeLost",
    DELETED_FOR_TAINT: NODE_TAINTED,
    "DeletionByDeviceTaintManager": DEVICE_TAINTED,
    "EvictionByEvictionAPI": "Drained",
    "TerminationByKubelet": "Evicted",
    "WorkloadEvictedDueToPreempted": PREEMPTED,
    "UnschedulableOnAssignedNode": NODE_TAINTED,
}
"""Our reason for each that the condition DisruptionTarget gives (KEP-3329), and Kueue's TerminationTarget and
TerminatedByKueue. There are others, such as WorkloadEvictedDueToClusterQueueStopped: they say nothing of the node.
"""


class Retry(StrEnum):
    """What a failure's cause says about trying again."""

    YES = "yes"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Failure:
    """One pod's failure."""

    reason: str
    message: str
    retry: Retry
    pod_name: str | None = None
    node_name: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    time: datetime | None = None
    seen: datetime | None = None
    """When its end was first seen, by our clock; None where it was there before us."""
    signal: str | None = None
    outside: bool = False
    """Ended by the cluster or by a person, not by itself: deleted, evicted, preempted by the scheduler."""
    report: TerminationReport | None = None
    """The pod's termination message, if it left one."""
    fenced_by: int | None = None
    """The later attempt of the same job that the volume knows."""


_GONE = "is no pod of the job any more: it was deleted, or its labels were"


def find_failures(
    pods: Iterable[PodView], missing: Iterable[tuple[str, int]], now: datetime, *, ran: bool = False
) -> tuple[Failure, ...]:
    """Every failure among the pods of one attempt.

    `missing` names pods that were there and are gone, with their node rank; with `ran`, all pods were running before.
    """
    pods = tuple(pods)
    found = {pod.uid: failure for pod in pods if (failure := _of_pod(pod, now))}
    others = [pod for pod in pods if pod.uid not in found]
    done = next((pod for pod in others if has_succeeded(pod)), None)
    failures = [_beside(others, done, failure) for failure in found.values()]
    if ran:
        failures = [replace(one, reason=NODE_REBOOTED) if one.reason in NOT_READMITTED else one for one in failures]
    failures += [
        Failure("PodDeleted", f"{name} {_GONE}", Retry.YES, pod_name=name, node_rank=node_rank, outside=True)
        for name, node_rank in missing
    ]
    return tuple(failures)


def _beside(others: list[PodView], done: PodView | None, failure: Failure) -> Failure:
    """`failure` with what the pods that have not failed say of it, one of them `done`, if all that it knows is a lost
    peer.

    The peer may have been done. In a collective that times out all ranks time out but those that are not in it.
    """
    if failure.reason != "PeerLost":
        return failure
    first, newline, rest = failure.message.partition("\n")
    if done is not None:
        clause = f"node rank {done.node_rank} had already finished its script"
    elif len(others) == 1 and not others[0].deleting and _TIMED_OUT.search(first):
        clause = f"the ranks of node rank {others[0].node_rank} did not time out: look there for one that did not join"
    else:
        return failure
    return replace(failure, message=f"{first}; {clause}{newline}{rest}")


def with_last_log_line(failure: Failure, log: str) -> Failure:
    """`failure` with the last line of its pod's log, where the trainer left no word: it may not be there."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if failure.report is not None or failure.outside or not lines:
        return failure
    return replace(failure, message=f"{failure.message}; the log of the pod ends with: {lines[-1][-LOG_LINE_LIMIT:]}")


def has_succeeded(pod: PodView) -> bool:
    """Whether the trainer is done. A sidecar that goes on, or that failed, does not change that."""
    return pod.termination.exit_code == 0 if pod.termination else pod.phase is PodPhase.SUCCEEDED


def last_report(pods: Iterable[PodView]) -> TerminationReport | None:
    """What node rank 0 said at its end, if it has ended and is among `pods`, those of one attempt. Where it took no
    step, since it came too late to join with live recovery, another that did.
    """
    reports = list(last_reports(pods))
    first = next((said for node_rank, said in reports if node_rank == 0), None)
    if first is None or first.step is not None:
        return first
    return next((said for _, said in reports if said.step is not None), first)


def last_snapshots(pods: Iterable[PodView]) -> tuple[SnapshotStatus, ...]:
    """The newest snapshot that each of `pods` knew of at its end: all ranks know of the one that they leave with."""
    return tuple(said.snapshot for _, said in last_reports(pods) if said.snapshot is not None)


def last_reports(pods: Iterable[PodView]) -> Iterator[tuple[int | None, TerminationReport]]:
    """What each of `pods` said at its end, with its node rank."""
    for pod in pods:
        if pod.termination is not None and (said := read_termination(pod.termination.message)) is not None:
            yield pod.node_rank, said


def cut_work(pods: Iterable[PodView]) -> tuple[str, ...]:
    """What the scripts of `pods`, which have succeeded, had left at work and was ended before it was done."""
    ends = [(pod.name, read_termination(pod.termination.message)) for pod in pods if pod.termination is not None]
    return tuple(f"{name}: {said.cut}" for name, said in ends if said is not None and said.cut)


def is_stopping(pod: PodView, now: datetime) -> bool:
    """Being deleted, and still within its grace: it may be saving a snapshot, and how it ends is worth waiting for."""
    if not pod.deleting or pod.termination is not None:
        return False
    return pod.gone_by is None or (now - pod.gone_by).total_seconds() < SETTLE_SECONDS


def first_cause(failures: tuple[Failure, ...], now: datetime, *, stopping: bool = False) -> Failure | None:
    """The failure to act on, or None while it is too early to tell a cause from its consequences.

    `stopping` says that a pod of the gang is being deleted and has not ended yet: a gang agrees to stop as a whole,
    so the others' ends may be its doing.
    """
    for rank_of_causes in (
        [failure for failure in failures if failure.retry is Retry.NEVER],
        [failure for failure in failures if failure.outside or failure.reason not in (*CONSEQUENCES, PREEMPTED)],
    ):
        if rank_of_causes:
            return min(rank_of_causes, key=_when)
    preempted = [failure for failure in failures if failure.reason == PREEMPTED]
    seconds = SETTLE_SECONDS if preempted else LOST_PEER_SECONDS
    if stopping or any(_settling(failure, now, seconds) for failure in failures):
        return None
    return min(preempted or failures, key=_when, default=None)


def _settling(failure: Failure, now: datetime, seconds: float) -> bool:
    """Young enough for its cause to be still on the way. A time ahead of ours is another clock's, and says nothing."""
    if failure.time is None:
        return False
    return 0 <= (now - (failure.seen or failure.time)).total_seconds() < seconds


def _when(failure: Failure) -> tuple[bool, float, int]:
    reported = failure.report.time if failure.report else None
    moment = reported if reported is not None else failure.time.timestamp() if failure.time else None
    return (moment is None, moment or 0.0, failure.node_rank or 0)


def _of_pod(pod: PodView, now: datetime) -> Failure | None:
    if has_succeeded(pod):
        return None
    if pod.termination is not None:
        return _of_termination(pod, pod.termination)
    if pod.deleting and pod.failed_to_begin:
        return None  # it goes, and is created again
    if pod.phase is PodPhase.FAILED or (pod.deleting and not is_stopping(pod, now)):
        outside = _stopped_by(pod)
        reason, message = outside or _never_started(pod)
        code = pod.init_failure.exit_code if pod.init_failure and not outside else None
        return Failure(reason, message, Retry.YES, pod.name, pod.node_name, pod.node_rank, exit_code=code,
                       outside=outside is not None or reason == NODE_REBOOTED)  # fmt: skip
    return None


def _never_started(pod: PodView) -> tuple[str, str]:
    """Why a pod failed whose trainer left no end."""
    init = pod.init_failure
    if init is None:
        return "PodFailed", f"pod {pod.name} failed"
    if init.reason in _FORGOTTEN_BY_RUNTIME:
        return NODE_REBOOTED, _node_came_back(pod)
    how = f"exited with code {init.exit_code}" + (f" ({init.reason})" if init.reason not in ("", "Error") else "")
    return "InitContainerFailed", f"pod {pod.name}: init container {init.container} {how}"


def _node_came_back(pod: PodView) -> str:
    return f"node {pod.node_name} was restarted, and pod {pod.name} ended with it"


def end_of_restarted_node(pod: PodView) -> Failure | None:
    """The end of a pod whose node came back without its containers."""
    if pod.termination is None or pod.termination.message or pod.termination.reason not in _FORGOTTEN_BY_RUNTIME:
        return None
    found = _of_termination(pod, pod.termination)
    return found if found.reason == NODE_REBOOTED else None


def _stopped_by(pod: PodView) -> tuple[str, str] | None:
    """What ended a pod from outside: the kubelet (Evicted, Terminated, ...), the control plane or a deletion."""
    if pod.phase is PodPhase.FAILED and pod.reason:
        return _reason_of_kubelet(pod), f"pod {pod.name} failed: {pod.message or pod.reason}"
    if pod.disruption == DELETED_FOR_TAINT and not pod.ended and pod.termination is None:
        return (
            NODE_LOST,
            f"node {pod.node_name} has a taint for which pod {pod.name} was deleted, and does not confirm it",
        )
    if pod.disruption:
        said = f"{pod.disruption}: {pod.disruption_message}" if pod.disruption_message else pod.disruption
        return _DISRUPTED.get(pod.disruption, DISRUPTED), f"pod {pod.name} was disrupted: {said[:LOG_LINE_LIMIT]}"
    if pod.deleting and pod.phase is PodPhase.PENDING and not pod.began:
        # nobody deletes it for what it does; one that goes in time is created again at no cost either
        return DISRUPTED, f"pod {pod.name} was deleted before it began, and its node takes long to confirm it"
    return ("PodDeleted", f"pod {pod.name} was deleted") if pod.deleting else None


def _reason_of_kubelet(pod: PodView) -> str:
    if pod.reason == "Evicted" and _OVER_ITS_LIMIT.search(pod.message) is not None:
        return "StorageLimitExceeded"
    if pod.reason == "DeadlineExceeded":  # of the pod: that of the job has this name
        return "PodDeadlineExceeded"
    if pod.reason == "TaintToleration":  # the taint was set between the binding and the admission of the pod
        return NODE_TAINTED
    # OutOf and the name of any resource, such as OutOfnvidia.com/gpu: that is no CamelCase
    return OUT_OF_RESOURCE if re.match(r"OutOf\w*\W", pod.reason) else pod.reason


def _of_termination(pod: PodView, ended: Termination) -> Failure:
    report = read_termination(ended.message)
    retry = Retry.NEVER if ended.exit_code in (EXIT_USER, EXIT_FENCED) else Retry.YES
    # runtimes keep that of any process which was killed, also where the others went on and the launcher ended in order
    if ended.reason == "OOMKilled" and (report is None or ended.exit_code not in _IN_ORDER):
        reason, message = "OOMKilled", f"pod {pod.name} was killed by the kernel's OOM killer"
    elif report is not None:
        reason, message = report.reason, _message(report)
    elif ended.reason in _FORGOTTEN_BY_RUNTIME:
        reason, message = NODE_REBOOTED, _node_came_back(pod)
    else:
        reason, message = _from_exit_code(pod, ended)
    fenced_by = _fenced_by(report) if ended.exit_code == EXIT_FENCED else None
    if fenced_by is not None:
        reason, retry = STATUS_RESTORED, Retry.YES
    deleted = pod.deleting and ended.reason == _STATUS_UNKNOWN
    evicted = pod.phase is PodPhase.FAILED and pod.reason in _ENDED_BY_KUBELET
    removed = reason == NODE_REBOOTED and (deleted or evicted)
    only_a_trace = removed or reason in TRACES_OF_A_STOP or (report is None and reason == "Failed")
    outside = _stopped_by(pod) if retry is Retry.YES and only_a_trace else None
    if outside:
        reason, message = outside
    return Failure(
        reason=reason,
        message=message,
        retry=retry,
        pod_name=pod.name,
        node_name=pod.node_name,
        node_rank=pod.node_rank,
        rank=report.rank if report else None,
        exit_code=ended.exit_code,
        step=report.step if report else None,
        time=ended.finished_at,
        seen=pod.end_seen,
        signal=_signal(report, ended),
        outside=outside is not None or reason == NODE_REBOOTED,
        report=report,
        fenced_by=fenced_by,
    )


def _fenced_by(report: TerminationReport | None) -> int | None:
    """The later attempt of the same job that has fenced this one, which is the current one by the job's status: that is
    older than the volume.
    """
    found = _FENCED.search(report.message) if report is not None else None
    return int(found[2]) if found else None


def _signal(report: TerminationReport | None, ended: Termination) -> str | None:
    """Name of the signal that ended a rank, as the report has it, or the whole container."""
    if report is not None and report.signal:
        return report.signal
    number = _signal_number(ended) if report is None else ended.signal
    try:
        return None if number is None else signal.Signals(number).name
    except ValueError:
        return None


def _signal_number(ended: Termination) -> int | None:
    return ended.signal or (ended.exit_code - 128 if 128 < ended.exit_code < 192 else None)


def _message(report: TerminationReport) -> str:
    """What happened, with the last lines of the traceback."""
    tail = (report.traceback or report.exception).strip()
    last = "\n".join(tail.splitlines()[-12:])
    return f"{report.message}\n{last}" if last and last not in report.message else report.message


def _from_exit_code(pod: PodView, ended: Termination) -> tuple[str, str]:
    """A container that left no message: killed, or not ours."""
    number = _signal_number(ended)
    tail = f": {ended.message.strip()[-LOG_LINE_LIMIT:]}" if ended.message.strip() else ""
    if ended.exit_code == EXIT_PREEMPTED:
        return PREEMPTED, f"pod {pod.name} was terminated by SIGTERM{tail}"
    if number is not None:
        return "WorkerKilled", f"pod {pod.name} was killed by signal {number}{tail}"
    by_runtime = ended.reason if ended.reason not in ("", "Error", "Completed") else "Failed"
    reason = {EXIT_USER: "UserError", EXIT_FENCED: "Fenced"}.get(ended.exit_code, by_runtime)
    return reason, f"pod {pod.name} exited with code {ended.exit_code}{tail}"
