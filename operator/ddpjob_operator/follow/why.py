"""Why a job is where it is: what ended it, what it waits for, what was lost, and what to do.

A pure function of the status, the pods and the warnings of a job. The operator has put causes and advice into the
status; this puts them into the order in which a person asks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api.reasons import FAILURES, STARTUP, STATES, Reason
from ddpjob_operator.api.spec import CONTROLLER_NAME, DDPJobSpec
from ddpjob_operator.api.status import Condition, DDPJobStatus, FailureStatus, Goodput, Phase
from ddpjob_operator.core.gang.members import STAYS_SPARE
from ddpjob_operator.core.gang.problems import GATED
from ddpjob_operator.core.ledger.ranks import NO_REPORTS, Reports
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import in_words
from ddpjob_operator.core.values.names import LABEL_JOB, dns_label
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.follow.pace import pace_of
from ddpjob_operator.follow.queued import Queued
from ddpjob_operator.follow.table import visible
from ddpjob_operator.local.observed import goodput_shares, progress_in_words, seconds_in_words, snapshot_in_words

_SPARE_NAME = re.compile(r"-\d+-s\d+$")
_FOREGROUND = "foregroundDeletion"
_MOST_LOG_LINES = 20
_MOST_PODS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning event of the job or of one of its pods."""

    time: datetime
    about: str
    """Name of the object, such as digits-0-1."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A job as the API server has it at one moment."""

    name: str
    created: datetime
    spec: DDPJobSpec | None
    """None if this version of the command cannot read it."""
    status: DDPJobStatus
    pods: tuple[PodView, ...]
    warnings: tuple[Warned, ...]
    """Oldest first."""
    now: datetime
    reports: Reports = NO_REPORTS
    """What the ranks of a job that runs say."""
    queued: Queued | None = None
    """Where Kueue holds back the pods of a job that waits."""
    deleted: datetime | None = None
    """When its deletion was asked for, while something holds it."""
    finalizers: tuple[str, ...] = ()
    """What does."""
    namespace: str = ""
    """Empty for a run on a machine."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the lines below it."""

    title: str
    lines: tuple[str, ...]

    def text(self) -> str:
        return "\n".join((self.title, *(f"  {line}".rstrip() for line in self.lines)))


@dataclass(frozen=True, slots=True)
class Answer:
    """One line that says it all, and the evidence."""

    headline: str
    sections: tuple[Section, ...]

    def text(self) -> str:
        """The answer for a terminal, without control characters."""
        text = "\n\n".join((self.headline, *(section.text() for section in self.sections)))
        return "\n".join(map(visible, text.split("\n")))


def why(seen: Seen) -> Answer:
    """Why the job is in its phase, for each of them."""
    if seen.deleted is not None:  # the phase is that of before: no operator acts on the job any more
        return _deleted(seen)
    match seen.status.phase:
        case None:
            return _unseen(seen)
        case Phase.SUCCEEDED:
            return _succeeded(seen)
        case Phase.FAILED:
            return _failed(seen)
        case Phase.RUNNING:
            return _running(seen)
        case Phase.SUSPENDED:
            return _suspended(seen)
        case Phase.PENDING | Phase.STARTING | Phase.RESTARTING:
            return _waiting(seen)


def _deleted(seen: Seen) -> Answer:
    foreground = _FOREGROUND in seen.finalizers
    others = ", ".join(name for name in seen.finalizers if name != _FOREGROUND)
    held = (
        "foreground deletion: the job goes when all pods and whatever else it owns are gone" if foreground else "",
        f"finalizers: {others}; each is removed by whatever has set it" if others else "",
    )
    # the garbage collector leaves them alone as long as their owner is there, unless it is deleted in the foreground
    stay = bool(others) and not foreground and any(not (pod.deleting or pod.ended) for pod in seen.pods)
    place = f" -n {seen.namespace}" if seen.namespace else ""  # in another one it would end pods of another job
    command = f"kubectl delete pods{place} -l {LABEL_JOB}={dns_label(seen.name)}"
    return Answer(
        f"{seen.name}: its deletion was asked for {_ago(seen.deleted, seen.now)} ago",
        (
            *_section("Waits for", *held),
            *_section("Pods that are left", *_by_state(seen.pods)),
            *((_todo(f"The pods stay until the job is gone. To end them now: {command}"),) if stay else ()),
        ),
    )


def _unseen(seen: Seen) -> Answer:
    age = _ago(seen.created, seen.now)
    if seen.spec is not None and seen.spec.managed_by not in (None, CONTROLLER_NAME):
        return Answer(
            f"{seen.name}: left to another controller (spec.managedBy: {seen.spec.managed_by})",
            (_todo("Ask that controller, or apply the job again without managedBy."),),
        )
    return Answer(
        f"{seen.name}: applied {age} ago, and no operator has acted on it",
        (
            _todo(
                "Check that the operator runs and serves this namespace: kubectl get pods -A -l "
                "app.kubernetes.io/name=ddpjob-operator; its chart value watch.namespaces lists the namespaces."
            ),
        ),
    )


def _succeeded(seen: Seen) -> Answer:
    status = seen.status
    took = _between(status.start_time, status.completion_time)
    headline = f"{seen.name}: Succeeded {_ago(status.completion_time, seen.now)} ago{f', after {took}' if took else ''}"
    return Answer(
        headline,
        (
            *_progress(seen),
            # what else needed attention is over with the job
            *_attention(seen, cond.LOSS_NOT_FINITE),
            *_lost(status),
            *_time(status.goodput),
            *_attempts(status.failures),
        ),
    )


def _failed(seen: Seen) -> Answer:
    status, found = seen.status, cond.find(seen.status.conditions, cond.FAILED)
    reason = found.reason if found is not None else "Failed"
    headline = f"{seen.name}: Failed ({reason}) {_ago(status.completion_time, seen.now)} ago"
    failure = status.last_failure
    row = _row(reason)
    # a job that failed for its last failure says so once, below Cause
    same = failure is not None and failure.reason == reason
    ended = () if same else _section("Ended", row.meaning if row else "", _first(found.message if found else ""))
    advice = (failure.advice if failure is not None else "") or (row.action if row is not None else "")
    return Answer(
        headline,
        (
            *ended,
            *_cause(failure),
            *_log(failure),
            *_lost(status),
            *_attempts(status.failures[:-1]),
            *_section("What to do", advice),
        ),
    )


def _running(seen: Seen) -> Answer:
    status, pace = seen.status, pace_of(seen.reports, seen.now)
    since = _since(status, cond.RUNNING) or status.start_time
    headline = f"{seen.name}: Running for {_ago(since, seen.now)}, attempt {status.attempt}, restarts {status.restarts}"
    return Answer(
        headline,
        (
            *_progress(seen),
            *_attention(seen, *cond.ATTENTION),
            *_section("Ranks", *pace.ranks),
            *_spares(status),
            *_section("Slowed by", *pace.slowed_by),
            *_time(status.goodput),
            *_lost(status),
            *_attempts(status.failures),
            *_section("What to do", *pace.todo),
        ),
    )


def _suspended(seen: Seen) -> Answer:
    status, found = seen.status, cond.find(seen.status.conditions, cond.SUSPENDED)
    since = found.last_transition_time if found is not None else None
    headline = f"{seen.name}: Suspended for {_ago(since, seen.now)}"
    queue = seen.spec.scheduling.queue if seen.spec is not None else None
    todo = f"ddpjob unsuspend {seen.name} resumes it, as does spec.suspend: false."
    if queue:  # Kueue and Volcano hold back pods, and leave the field alone
        todo += f" Its pods then wait in the queue {queue}."
    return Answer(headline, (*_progress(seen), _todo(todo), *_attempts(status.failures)))


def _waiting(seen: Seen) -> Answer:
    status = seen.status
    since = _since(status, cond.RESTARTING) or status.start_time or seen.created
    waits, todo = _waits_for(seen)
    headline = f"{seen.name}: {status.phase} for {_ago(since, seen.now)}: {waits}"
    last = status.last_failure
    failed = last if last is not None and last.attempt == status.attempt - 1 else None
    return Answer(
        headline,
        (
            *_kueue(seen.queued),
            *_pods(seen.pods),
            *_warnings(seen),
            *_cause(failed, "Cause of the restart"),
            *_lost(status),
            *_section("What to do", todo or (failed.advice if failed is not None else "")),
        ),
    )


def _waits_for(seen: Seen) -> tuple[str, str]:
    """What the job waits for in half a sentence, and what to do about it, if anything."""
    status, now = seen.status, seen.now
    degraded = _holding(status, cond.DEGRADED, "True")
    if degraded is not None:
        return _line(degraded), _action(degraded)
    initialized = _holding(status, cond.INITIALIZED, "False")
    if initialized is not None:
        left = (status.retry_at - now).total_seconds() if status.retry_at else 0.0  # it stays when the next try runs
        retry = f"; retried in {seconds_in_words(left)}" if left > 0 else ""
        row = _row(initialized.reason)
        return f"initializers: {_first(initialized.message)}{retry}", row.action if row and retry else ""
    if status.restart_at is not None and status.restart_at > now:
        wait = seconds_in_words((status.restart_at - now).total_seconds())
        return f"backoff after a failure, {wait} left (restart.backoff)", ""
    if seen.queued is not None:
        row = _row(GATED)
        return seen.queued.waits, row.action if row is not None and not seen.queued.notes else ""
    scheduled = _holding(status, cond.SCHEDULED, "False")
    if scheduled is not None and scheduled.message:  # without one it is of the attempt before, of which more follows
        return _line(scheduled), _action(scheduled)
    ready, total = status.nodes.ready, status.nodes.total or (seen.spec.nodes if seen.spec is not None else 0)
    return f"{ready} of {total} pods are ready", ""


def _progress(seen: Seen) -> tuple[Section, ...]:
    progress, snapshot = seen.status.progress, seen.status.snapshot
    lines = []
    if progress is not None and progress.step is not None:
        lines.append(progress_in_words(progress, seen.now))
    if snapshot is not None:
        lines.append(f"{snapshot_in_words(snapshot)}, {_ago(snapshot.time, seen.now)} ago")
    return _section("Progress", *lines)


def _attention(seen: Seen, *kinds: str) -> tuple[Section, ...]:
    """What a job complains of, of these conditions."""
    found = (_holding(seen.status, kind, "True") for kind in kinds)
    lines = [line for item in found if item is not None for line in (_line(item), _action(item)) if line]
    return _section("Needs attention", *lines)


def _line(condition: Condition) -> str:
    return f"{condition.reason}: {_first(condition.message)}"


def _action(condition: Condition) -> str:
    row = _row(condition.reason)
    return row.action if row is not None else ""


def _spares(status: DDPJobStatus) -> tuple[Section, ...]:
    """Which of them have taken the places of other pods."""
    kept = status.internal.kept_pods.items()
    places = sorted((rank, name) for name, rank in kept if rank != STAYS_SPARE and _SPARE_NAME.search(name))
    return _section("Spares", *(f"{name} has taken the place of node rank {rank}" for rank, name in places))


def _cause(failure: FailureStatus | None, title: str = "Cause") -> tuple[Section, ...]:
    if failure is None:
        return ()
    row = _row(failure.reason)
    return _section(
        title,
        f"{failure.reason}: {row.meaning}" if row is not None and row.meaning else failure.reason,
        *(failure.message.splitlines() or ("no message",)),
        _place(failure),
    )


def _place(failure: FailureStatus) -> str:
    """Such as `rank 1 of pod digits-2-1 on node worker-3, attempt 2, step 340, SIGKILL`."""
    where = f"pod {failure.pod_name}" if failure.pod_name else "the gang"
    if failure.rank is not None:
        where = f"rank {failure.rank} of {where}"
    if failure.node_name:
        where = f"{where} on node {failure.node_name}"
    parts = [where, f"attempt {failure.attempt}"]
    if failure.step is not None:
        parts.append(f"step {failure.step}")
    if failure.signal is not None:
        parts.append(failure.signal)
    elif failure.exit_code is not None:
        parts.append(f"exit code {failure.exit_code}")
    return ", ".join(parts)


def _log(failure: FailureStatus | None) -> tuple[Section, ...]:
    if failure is None or not failure.log_tail.strip():
        return ()
    return _section(f"Last lines of {failure.pod_name or 'its log'}", *failure.log_tail.splitlines()[-_MOST_LOG_LINES:])


def _lost(status: DDPJobStatus) -> tuple[Section, ...]:
    goodput = status.goodput
    lines = []
    if goodput is not None and goodput.recomputed_steps:
        lines.append(f"{in_words(goodput.recomputed_steps, 'step')} lost with failures or taken back by a restore")
    if goodput is not None and goodput.recovering >= 1:
        lines.append(f"{seconds_in_words(goodput.recovering)} went into restarts and into the steps that were lost")
    if status.excluded_nodes:
        how = "that others are preferred to" if status.internal.node_names_refused else "no longer used"
        lines.append(f"nodes {how}: {', '.join(status.excluded_nodes)}")
    lines += [f"snapshot set aside: {snapshot}" for snapshot in status.corrupt_snapshots]
    return _section("Lost", *lines)


def _time(goodput: Goodput | None) -> tuple[Section, ...]:
    """Where the time went: every activity that took a noticeable share, and a second, the largest first."""
    lines = [
        f"{share:>4.0%}  {_activity(name)}, {seconds_in_words(seconds)}"
        for name, seconds, share in goodput_shares(goodput)
        if seconds >= 1
    ]
    return _section("Time", *lines)


def _activity(name: str) -> str:
    return "unknown, such as imports before a first step" if name == "unknown" else name


def _attempts(failures: tuple[FailureStatus, ...]) -> tuple[Section, ...]:
    lines = [
        f"{failure.time:%H:%M:%S}  {failure.reason}: {_first(failure.message)}; {_place(failure)}"
        for failure in failures
    ]
    return _section("Earlier failures", *lines)


def _kueue(queued: Queued | None) -> tuple[Section, ...]:
    return () if queued is None else _section("Kueue", queued.said, *queued.notes)


def _pods(pods: tuple[PodView, ...]) -> tuple[Section, ...]:
    waiting = [pod for pod in pods if not pod.ended and not pod.ready]
    return _section("Pods that are not ready", *_by_state(waiting))


def _by_state(pods: Iterable[PodView]) -> list[str]:
    """Pods by what they wait for: the same words are said once."""
    groups: dict[str, list[str]] = defaultdict(list)
    for pod in pods:
        groups[_state(pod)].append(pod.name)
    lines = []
    for state, names in groups.items():
        shown = ", ".join(names[:_MOST_PODS_NAMED])
        more = f" and {len(names) - _MOST_PODS_NAMED} more" if len(names) > _MOST_PODS_NAMED else ""
        lines.append(f"{shown}{more}: {state}")
    return lines


def _state(pod: PodView) -> str:
    if pod.deleting:
        return "is being deleted" + (f", node {pod.node_name}" if pod.node_name else "")
    if pod.reason:
        return f"{pod.reason}: {_first(pod.message)}" if pod.message else pod.reason
    if pod.phase is PodPhase.PENDING:
        init = f": its init container {pod.init_running} runs" if pod.init_running else ""
        return f"starting on node {pod.node_name}{init}" if pod.node_name else "no node yet"
    return f"{pod.phase} on node {pod.node_name}{'' if pod.ready or pod.ended else ', not ready'}"


def _warnings(seen: Seen) -> tuple[Section, ...]:
    """The newest warning of each reason and object, the five newest of these at most, newest last."""
    newest = {(warned.reason, warned.about): warned for warned in seen.warnings}
    lines = [
        f"{_ago(warned.time, seen.now)} ago  {warned.about}: {warned.reason}: {_first(warned.message)}"
        for warned in sorted(newest.values(), key=lambda item: item.time)[-5:]
    ]
    return _section("Warnings", *lines)


def _holding(status: DDPJobStatus, kind: str, value: str) -> Condition | None:
    found = cond.find(status.conditions, kind)
    return found if found is not None and found.status == value else None


def _since(status: DDPJobStatus, phase: str) -> datetime | None:
    """When the job came into the phase of this condition; else, the attempt began, which may be long before it runs."""
    found = _holding(status, phase, "True")
    return found.last_transition_time if found is not None else status.attempt_start_time


def _row(reason: str) -> Reason | None:
    return next((row for row in (*STATES, *STARTUP, *FAILURES) if row.name == reason), None)


def _todo(line: str) -> Section:
    return Section("What to do", (line,))


def _section(title: str, *lines: str) -> tuple[Section, ...]:
    """A section of the lines that are not empty; none without them."""
    kept = tuple(line for line in lines if line)
    return (Section(title, kept),) if kept else ()


def _first(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _ago(then: datetime | None, now: datetime) -> str:
    return seconds_in_words((now - then).total_seconds()) if then is not None else "a while"


def _between(start: datetime | None, end: datetime | None) -> str:
    return seconds_in_words((end - start).total_seconds()) if start is not None and end is not None else ""
