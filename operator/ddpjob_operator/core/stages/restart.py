"""Begin the next attempt: after a failure, a change of size or a suspension; with new pods or, in place, with those
that can be kept.

The status goes first. From then on the old attempt is fenced, whatever happens to this process, and what the attempt
is made of is on record: its number, its size, the spec it was made from, and the pods that are kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.budget import refilled_by_progress
from ddpjob_operator.core.failure.decide import GiveUp, RestartIn, decide, with_clause
from ddpjob_operator.core.failure.detect import (
    CONSEQUENCES,
    Failure,
    find_failures,
    first_cause,
    is_stopping,
    last_reports,
    with_last_log_line,
)
from ddpjob_operator.core.failure.log_tail import log_tail, log_to_read, without_secrets
from ddpjob_operator.core.failure.node_exclusion import forgiven
from ddpjob_operator.core.failure.node_lost import STRANDED_SECONDS, lost_nodes, patience, stranded, until_lost
from ddpjob_operator.core.gang.children import missing_group
from ddpjob_operator.core.gang.elastic import Resize, grace_of_old, next_size, still_saving
from ddpjob_operator.core.gang.in_place import kept_pods
from ddpjob_operator.core.gang.live import in_their_place, is_live, obstacle, without_lost
from ddpjob_operator.core.gang.members import (
    avoiding_gone_nodes,
    discard,
    fill_gang,
    is_incomplete,
    left_over,
    members,
    missing,
    with_node_counts,
)
from ddpjob_operator.core.ledger.progress import with_failure, with_final_report
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.spec_changes import digests, made_otherwise
from ddpjob_operator.core.stages.all_or_nothing import plan_incomplete
from ddpjob_operator.core.stages.finished import plan_failed, plan_refused
from ddpjob_operator.core.transitions import NextAttempt
from ddpjob_operator.core.values.actions import Action, Event, Plan
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport

SETTLE_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt is over."""

    reason: str
    message: str = ""
    delay: float = 0.0
    """Seconds until the next one may start."""
    size: int | None = None
    """Of how many nodes it is; None where its size does not change for this cause."""
    after: int = 0
    """An attempt that there has been, whatever the status says."""
    event: Event | None = None
    """Reported in place of the warning that the gang restarts."""


def plan_restart(look: Look) -> Plan | None:
    """Restart the gang, or fail the job, if a pod of the gang has failed; None if none has."""
    pods = members(look)
    # with live recovery, pods that take the place of lost ones are created while the job is Running
    ran = look.status.phase is Phase.RUNNING and not look.status.internal.lost_pods
    failures = find_failures(pods, missing(look), look.now, ran=ran)
    failures += lost_nodes(pods, patience(look), look.now)
    failures = failures or stranded(pods, look.status.attempt, look.observed.report)
    why_not = obstacle(look, pods, failures) if failures and is_live(look) else ""
    if why_not is None:
        return _replace_lost(look, pods, failures)
    stopping = any(is_stopping(pod, look.now) for pod in pods)
    if not (failures or stopping):
        return None
    cause = first_cause(failures, look.now, stopping=stopping)
    if cause is None:
        return Plan(look.status, requeue_after=SETTLE_LOOK_SECONDS)
    if (again := plan_incomplete(look, cause)) is not None:
        return again
    if (read := log_to_read(look.observed, cause)) is not None:
        return Plan(look.status, (read,))  # a log goes with its pod
    return _after_failure(with_node_counts(look), cause, why_not)


def _replace_lost(look: Look, pods: tuple[PodView, ...], failures: tuple[Failure, ...]) -> Plan:
    """The others train on: take the place of the lost pods, in the same attempt. Their loss counts once."""
    cause = first_cause(failures, look.now) or failures[0]
    if (read := log_to_read(look.observed, cause)) is not None:
        return Plan(look.status, (read,))
    post_mortem, tail = _with_log(look, cause)
    decided = decide(look, post_mortem)
    if isinstance(decided, GiveUp):  # the log has shown that it failed so before
        return _after_failure(with_node_counts(look), cause)
    look, before = without_lost(look.with_status(decided.status), pods, failures), look
    look = with_failure(with_node_counts(look), post_mortem, tail)
    what = with_clause(post_mortem.message, decided.explanation).splitlines()[0]
    message = f"{what}; the other ranks of attempt {look.status.attempt} go on; {in_their_place(before, look)}"
    return Plan(
        look.status,
        discard(look, left_over(look)),
        status_first=True,
        requeue_after=0.0,
        events=(Event("Warning", "RecoveringLive", message),),
    )


def _with_log(look: Look, cause: Failure) -> tuple[Failure, str]:
    """`cause` as people may read it, and the last lines of its pod's log."""
    tail = log_tail(look.job, look.observed, cause)
    cause = with_last_log_line(cause, tail)
    return replace(cause, message=without_secrets(look.job, cause.message)), tail


def _after_failure(look: Look, cause: Failure, why_not_live: str = "") -> Plan:
    before = look.status
    look = look.with_status(with_final_report(look.status, _furthest(look, cause), look.now))
    cause, tail = _with_log(look, cause)
    match decide(look, cause):
        case GiveUp("BackoffLimitExceeded") if (wait := _until_cause_shows(look, cause)) is not None:
            return Plan(before, requeue_after=wait)
        case GiveUp(reason, message):
            return plan_failed(with_failure(look, cause, tail), reason, message)
        case RestartIn() if isinstance(refused := admission(look), Refused):
            return plan_refused(with_failure(look, cause, tail), refused)  # there is no restart to be counted
        case RestartIn(reason, seconds, after, why):
            look = with_failure(look.with_status(after), cause, tail)
            why = f"{why}; no live recovery: {why_not_live}" if why_not_live else why
            return next_attempt(
                look, Cause(reason, with_clause(cause.message, why), seconds, after=cause.fenced_by or 0)
            )


def _furthest(look: Look, cause: Failure) -> TrainerReport | None:
    """What the pod that failed said at its end, or one of the gang that came further: with live recovery the others may
    have left it behind.
    """
    said = [report for _, report in last_reports(members(look))]
    known = said if cause.report is None else [cause.report, *said]
    return max(known, key=lambda report: -1 if report.step is None else report.step, default=None)


def _until_cause_shows(look: Look, cause: Failure) -> float | None:
    """Seconds to wait before a job is given up for the loss of a peer; None if there is nothing to wait for.

    The node of a pod that still runs may be gone, which is a disruption, and shows after up to a minute.
    """
    pods, since = members(look), cause.seen or cause.time
    if cause.reason not in CONSEQUENCES or since is None or not any(pod.running for pod in pods):
        return None
    left = STRANDED_SECONDS - look.seconds_since(since)
    return until_lost(pods, patience(look), look.now) or (left if 0 < left <= STRANDED_SECONDS else None)


def resize(look: Look, change: Resize) -> Plan:
    """Begin an attempt of another size. Nothing failed, so it costs no budget."""
    status = refilled_by_progress(look.status, look.now)
    look = look.with_status(recorded(status, disruptions=status.disruptions + 1))
    message = f"{change.message}; attempt {look.status.attempt + 1} has {change.size}"
    event = Event("Normal", change.reason, message)
    return next_attempt(look, Cause(change.reason, change.message, size=change.size, event=event))


def resume_attempt(look: Look) -> Plan:
    """Begin an attempt after a suspension, which costs no budget."""
    look = look.with_status(refilled_by_progress(look.status, look.now))
    message = f"resumed after a suspension with attempt {look.status.attempt + 1}"
    return next_attempt(look, Cause("Resumed", "resumed after a suspension", event=Event("Normal", "Resumed", message)))


def restart_of_edited(look: Look, delay: float = 0.0) -> Plan | None:
    """Begin an attempt anew of which pods are missing, if these would not be like those that are there."""
    if not (is_incomplete(look) and made_otherwise(look.job, look.status, look.defaults)):
        return None
    look = look.with_status(refilled_by_progress(look.status, look.now))
    message = "the spec or the operator's defaults changed while pods were missing"
    return next_attempt(look, Cause("SpecChanged", message, delay))


def next_attempt(look: Look, cause: Cause) -> Plan:
    """Begin the next attempt; or fail, if an edit that the API server could not refuse is beyond a bound."""
    look = look.with_status(forgiven(look.job.spec.restart, look.status, look.now))
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return plan_refused(look, admitted)
    message = f"attempt {look.status.attempt} ended: {cause.message or cause.reason}"
    size = cause.size or next_size(look)
    kept = kept_pods(look, size)
    made_from = digests(look.job, look.defaults)
    look = transitions.begin_attempt(
        look, NextAttempt(size, cause.reason, message, made_from, cause.delay, kept, cause.after)
    )
    old = tuple(pod for pod in look.observed.pods if pod.name not in kept)
    actions: list[Action] = [*discard(look, old, grace_seconds=grace_of_old(look.status))]
    wait = cause.delay or still_saving(look)
    if not wait:
        look = avoiding_gone_nodes(look)
        actions += missing_group(look, admitted) or fill_gang(look, admitted)
    restarting = f"{message.splitlines()[0]}; starting attempt {look.status.attempt}"
    return Plan(
        look.status,
        tuple(actions),
        status_first=True,
        requeue_after=wait or (None if look.observed.service else 0.0),
        events=(cause.event or Event("Warning", "Restarting", restarting),),
    )
