"""From how pods ended to what went wrong: the first cause, whether a retry makes sense, and what a person should do.

When one rank dies, every other one soon reports that its peer went away. Those reports are consequences: they only
count when no cause shows up within `SETTLE_SECONDS`, the time that the kubelet takes to report a pod that ended at
the same moment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from ddpjob_operator.core.model import PodPhase, PodView, Termination

SETTLE_SECONDS = 3.0

EXIT_USER = 64
EXIT_FENCED = 77
EXIT_PREEMPTED = 143

CONSEQUENCES = ("PeerLost", "RendezvousFailed")
PREEMPTED = "Preempted"
TRACES_OF_A_STOP = (PREEMPTED, "WorkerKilled", *CONSEQUENCES)
"""What a pod says of its end when the kubelet ended it: a deletion or an eviction explains these, and nothing else."""

_LARGEST_INTEGER = 2**63 - 1  # of an integer in a status
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")


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
    report: dict[str, Any] | None = None
    """The pod's termination message, if it left one (docs/contracts.md section 5)."""


ADVICE: dict[str, str] = {
    "OOMKilled": "The container used more memory than its limit: raise it, or lower the batch size.",
    "OutOfMemory": "The device ran out of memory: lower the micro-batch, use bf16, or shard the model.",
    "ImportError": "A module is missing from the image: install it there, or correct the import.",
    "UserError": "Correct the job's arguments and apply it again; it would fail the same way on a retry.",
    "Fenced": "Another job writes to the same checkpoints folder: give this job another name or another volume.",
    "DiskFull": "The volume at /mnt/shared is full: remove old files, lower snapshots.keep, or enlarge the claim.",
    "Stalled": "A rank stood still; its stack is below /mnt/shared/logs. Look for a collective that some ranks skip.",
    "WorkerKilled": "A signal ended the process. If nobody sent it, look at the memory of the pod and of its node.",
    "WorkerException": "The training script raised; its last lines are in the message, all of them in the pod's log.",
    "PeerLost": "The connection to another rank broke: look at the network, and at the other pods of this attempt.",
    "RendezvousFailed": "Not all nodes met in time: check that pods can reach each other on port 29500.",
    "StartError": "The container did not start: check that the image has python and the package ddp_trainer.",
    "PodDeleted": "Somebody or something deleted the pod; training goes on from the last snapshot.",
    "Evicted": "The node ran short of a resource: set resources.requests to what the job really uses.",
    "Preempted": "The pod was asked to stop and saved a snapshot; training goes on from it.",
    "ErrImagePull": "The image cannot be pulled: check its name and tag, and imagePullSecrets.",
    "CreateContainerConfigError": "The container cannot be made: check the Secrets and ConfigMaps that env refers to.",
    "Unschedulable": "No node fits the pod: check its resources, node selector, tolerations and volume claim.",
}


def advice_for(reason: str) -> str:
    """One sentence of what to do about `reason`; empty if there is nothing useful to say."""
    return ADVICE.get(reason, "")


def find_failures(pods: Iterable[PodView], missing: Iterable[tuple[str, int]], now: datetime) -> tuple[Failure, ...]:
    """Every failure among the pods of one attempt.

    `missing` names pods that were there and are gone, with their node rank.
    """
    failures = [failure for pod in pods if (failure := _of_pod(pod, now))]
    failures += [
        Failure("PodDeleted", f"pod {name} was deleted", Retry.YES, pod_name=name, node_rank=node_rank)
        for name, node_rank in missing
    ]
    return tuple(failures)


def has_succeeded(pod: PodView) -> bool:
    """Whether the trainer is done. A sidecar that goes on, or that failed, does not change that."""
    return pod.termination.exit_code == 0 if pod.termination else pod.phase is PodPhase.SUCCEEDED


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
        [failure for failure in failures if failure.reason not in (*CONSEQUENCES, PREEMPTED)],
    ):
        if rank_of_causes:
            return min(rank_of_causes, key=_when)
    if stopping or any(_settling(failure, now) for failure in failures):
        return None
    preempted = [failure for failure in failures if failure.reason == PREEMPTED]
    return min(preempted or failures, key=_when, default=None)


def _settling(failure: Failure, now: datetime) -> bool:
    """Young enough for its cause to be still on the way. A time ahead of ours is another clock's, and says nothing."""
    if failure.time is None:
        return False
    return 0 <= (now - failure.time).total_seconds() < SETTLE_SECONDS


def _when(failure: Failure) -> tuple[bool, float, int]:
    told = finite((failure.report or {}).get("time"))
    moment = told if told is not None else failure.time.timestamp() if failure.time else None
    return (moment is None, moment or 0.0, failure.node_rank or 0)


def _of_pod(pod: PodView, now: datetime) -> Failure | None:
    if has_succeeded(pod):
        return None
    if pod.termination is not None:
        return _of_termination(pod, pod.termination)
    if pod.phase is PodPhase.FAILED or (pod.deleting and not is_stopping(pod, now)):
        reason, message = _stopped_by(pod) or ("PodFailed", f"pod {pod.name} failed")
        return Failure(reason, message, Retry.YES, pod.name, pod.node_name, pod.node_rank)
    return None


def _stopped_by(pod: PodView) -> tuple[str, str] | None:
    """What ended a pod from outside: the kubelet (Evicted, Terminated, ...) or a deletion."""
    if pod.phase is PodPhase.FAILED and pod.reason:
        return pod.reason, pod.message or f"pod {pod.name} failed: {pod.reason}"
    return ("PodDeleted", f"pod {pod.name} was deleted") if pod.deleting else None


def _of_termination(pod: PodView, ended: Termination) -> Failure:
    report = read_report(ended.message)
    retry = Retry.NEVER if ended.exit_code in (EXIT_USER, EXIT_FENCED) else Retry.YES
    if ended.reason == "OOMKilled":
        reason, message = "OOMKilled", f"pod {pod.name} was killed by the kernel: out of memory"
    elif report is not None:
        reason, message = _reason(report), _message(report)
    else:
        reason, message = _from_exit_code(pod, ended)
    only_a_trace = reason in TRACES_OF_A_STOP or (report is None and reason == "Failed")
    if retry is Retry.YES and only_a_trace and (outside := _stopped_by(pod)):
        reason, message = outside
    return Failure(
        reason=reason,
        message=message,
        retry=retry,
        pod_name=pod.name,
        node_name=pod.node_name,
        node_rank=pod.node_rank,
        rank=integer((report or {}).get("rank")),
        exit_code=ended.exit_code,
        step=integer((report or {}).get("step")),
        time=ended.finished_at,
        report=report,
    )


def _reason(report: dict[str, Any]) -> str:
    """The report's reason, if it is one word: it becomes a condition's reason."""
    reason = report.get("reason")
    return reason if isinstance(reason, str) and _REASON.fullmatch(reason) else "Failed"


def _message(report: dict[str, Any]) -> str:
    message = str(report.get("message") or "")
    tail = str(report.get("traceback") or report.get("exception") or "").strip()
    last = "\n".join(tail.splitlines()[-12:])
    return f"{message}\n{last}" if last and last not in message else message


def _from_exit_code(pod: PodView, ended: Termination) -> tuple[str, str]:
    """A container that left no message: killed, or not ours."""
    signal = ended.signal or (ended.exit_code - 128 if 128 < ended.exit_code < 192 else None)
    tail = f": {ended.message.strip()[-500:]}" if ended.message.strip() else ""
    if ended.exit_code == EXIT_PREEMPTED:
        return PREEMPTED, f"pod {pod.name} was stopped by SIGTERM{tail}"
    if signal is not None:
        return "WorkerKilled", f"pod {pod.name} was killed by signal {signal}{tail}"
    told = ended.reason if ended.reason not in ("", "Error", "Completed") else "Failed"
    reason = {EXIT_USER: "UserError", EXIT_FENCED: "Fenced"}.get(ended.exit_code, told)
    return reason, f"pod {pod.name} ended with exit code {ended.exit_code}{tail}"


def read_report(text: str) -> dict[str, Any] | None:
    """A termination message of version 1, or None if the text is something else.

    Any process of the container may have written it, so nothing is taken for granted: not its depth, and not that its
    escapes are characters.
    """
    try:
        report = json.loads(text, object_pairs_hook=_clean)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and report.get("version") == 1 else None


def _clean(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for key, value in pairs}


def integer(value: Any) -> int | None:
    """`value` if it is a whole number that a status can carry."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= _LARGEST_INTEGER else None


def finite(value: Any) -> float | None:
    """`value` if it is a number that JSON and an API server can carry: a loss of NaN is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
