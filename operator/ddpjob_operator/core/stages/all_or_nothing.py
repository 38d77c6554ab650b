"""All or nothing: a gang that cannot be completed gives back what it holds, and tries again later.

Two gangs that each hold half of what there is would wait for each other for ever. So when the API server refuses a
pod of the gang (quota, admission), the others are deleted at once; and when some pods have nodes and the rest has
none for longer than `scheduling.timeoutSeconds`, all of them are. The next try comes after a growing wait and is
neither a restart nor a disruption. It is a new attempt, since pods of this one may have begun on their nodes. That the
job waits is on record since the first try, and so is its startup deadline.

Some things are not given back: what an elastic gang can go on with, the place in a queue of pods that hold no node yet,
and, when the API server refuses a pod, a gang whose last attempt is still going, or whose names another owner has: what
those hold is what is missing, and they let go of it by themselves. Nor is a gang for a webhook that fails for a moment:
of 256 pods, one in a hundred would keep it from ever being complete.

Where nobody gives it back, the ranks of the pods that run give up waiting for the others after some minutes. No program
has failed then, either: the gang is tried again as above, and pods that run stay if the scope keeps them, for two
tries at most while a pod finds no node. An elastic gang goes on with the nodes that there are.
"""

from __future__ import annotations

import re

from ddpjob_operator.api.policies import Backoff
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.budget import backoff_seconds, released
from ddpjob_operator.core.failure.detect import CONSEQUENCES, Failure
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.failure.node_exclusion import forgiven
from ddpjob_operator.core.failure.restart_rules import RuleAction, rule_on
from ddpjob_operator.core.gang.in_place import kept_pods
from ddpjob_operator.core.gang.members import (
    LEAST_WAIT_SECONDS,
    about_to_be_assigned,
    asking_since,
    discard,
    done_and_gone,
    members,
    still_holds,
    stop,
)
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.stages.finished import plan_refused
from ddpjob_operator.core.transitions import NextAttempt
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import ADMISSION_FAILED, NAME_TAKEN, QUOTA_EXCEEDED, Problem, in_words
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import pod_name
from ddpjob_operator.core.values.observed import PodPhase

TIMEOUT = "GangTimeout"

LEAST_VAIN_SECONDS = 300.0
"""For how long pods must have been waited for until a lost peer may be one that never came: ranks wait for ten minutes.
A script that loses a connection sooner fails by itself, however slow another pod is to start, and that counts.
"""

TRIES_IN_PLACE = 2
"""How often in a row, disruptions included, a gang keeps its pods while one of them finds no node. Then it gives back
all nodes: two gangs that kept theirs would wait for each other for ever.
"""

LONGEST_QUOTA_SECONDS = 60
"""The longest wait after a quota's refusal: room may come at any time, and a try ends at the first refusal."""

TRANSIENT_SECONDS = 60.0
"""How long an admission webhook may fail before that counts as a refusal."""


def plan_release(look: Look) -> Plan | None:
    """Give back the gang if it cannot be completed; None while there is hope, or nothing to give back."""
    if look.status.phase not in (Phase.STARTING, Phase.RESTARTING):
        return None
    problem = _refused(look) or _not_in_time(look)
    if problem is None:
        return None
    # the next attempt would be made from the spec as it is now
    if isinstance(refused := admission(look), Refused):
        return plan_refused(look, refused)
    job, delay = look.job, _seconds_until_next_try(look, problem)
    found = f"{len(members(look))} of {look.gang_size} pods were released: {problem.message}"
    message = f"{found}; retrying in {delay:.0f} s"
    following = NextAttempt(_next_size(look), problem.reason, message, digests(job, look.defaults), delay)
    status = released(forgiven(job.spec.restart, look.status, look.now))
    look = transitions.release_gang(look.with_status(status), following)
    return Plan(
        look.status,
        stop(look.observed.pods, everything=True),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", "GangReleased", _without_attempt(look, found.splitlines()[0])),),
    )


def plan_incomplete(look: Look, cause: Failure) -> Plan | None:
    """Try a gang again whose ranks gave up waiting for pods that do not run yet; None if `cause` is another end."""
    if look.status.phase not in (Phase.STARTING, Phase.RESTARTING) or not _waited_in_vain(look, cause):
        return None
    if isinstance(refused := admission(look), Refused):
        return plan_refused(look, refused)
    job, total, placed = look.job, look.gang_size, _placed(look)
    # one whose waitSeconds are longer than ranks wait would never shrink: they begin anew with each try
    size = placed if _is_enough(look, placed) else _next_size(look)
    hopeful = placed >= size or look.status.disruptions_since_progress < TRIES_IN_PLACE
    kept: dict[str, int] = kept_pods(look, size) if hopeful else {}
    problem = Problem(TIMEOUT, f"ranks gave up waiting for {total - len(_begun(look))} of {total} pods{_why(look)}")
    delay = _seconds_until_next_try(look, problem)
    fewer = f" with {in_words(size, 'node')}" if size < total else ""
    message = f"{problem.message}; retrying{fewer} in {delay:.0f} s"
    following = NextAttempt(size, problem.reason, message, digests(job, look.defaults), delay, kept)
    status = released(forgiven(job.spec.restart, look.status, look.now))
    look = transitions.release_gang(look.with_status(status), following)
    return Plan(
        look.status,
        discard(look, tuple(pod for pod in look.observed.pods if pod.name not in kept)),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", "Restarting", _without_attempt(look, problem.message.splitlines()[0])),),
    )


def _waited_in_vain(look: Look, cause: Failure) -> bool:
    """Whether all that is known is a lost peer, and some pods of the gang were never there to be one. Rules of the
    job's own decide first.
    """
    reason = diagnose(cause).reason
    if cause.reason not in CONSEQUENCES or reason not in CONSEQUENCES or len(_begun(look)) >= look.gang_size:
        return False
    since, ruling = asking_since(look), rule_on(look.job.spec.restart, cause, reason)
    if since is None or look.seconds_since(since) < LEAST_VAIN_SECONDS:
        return False
    return ruling.action is RuleAction.RESTART and not ruling.explicit


def _begun(look: Look) -> frozenset[int | None]:
    """Node ranks of the pods that run, or did."""
    return frozenset(pod.node_rank for pod in members(look) if pod.phase is not PodPhase.PENDING) | done_and_gone(look)


def _next_size(look: Look) -> int:
    """Of the gang that is tried again: that of the spec from which it is made, but for an elastic one."""
    return look.gang_size if look.job.spec.elastic is not None else look.job.spec.nodes


def _placed(look: Look) -> int:
    """How many pods of the gang have a node, or had one."""
    return sum(pod.placed and not pod.deleting for pod in members(look)) + len(done_and_gone(look))


def _why(look: Look) -> str:
    """What a pod that does not run waits for, as a clause."""
    waiting = (pod for pod in members(look) if pod.phase is PodPhase.PENDING and (pod.message or pod.reason))
    return next((f": pod {pod.name}: {pod.message or pod.reason}" for pod in waiting), "")


def _seconds_until_next_try(look: Look, problem: Problem) -> float:
    backoff, waits = look.job.spec.restart.backoff, look.status.disruptions_since_progress
    if problem.reason == QUOTA_EXCEEDED:
        most = min(backoff.max_seconds, LONGEST_QUOTA_SECONDS)
        backoff = Backoff(initial_seconds=backoff.initial_seconds, max_seconds=most)
    return max(LEAST_WAIT_SECONDS, backoff_seconds(backoff, waits, f"{look.job.uid}/{look.status.attempt}"))


def _without_attempt(look: Look, said: str) -> str:
    """The message of an event without the numbers of attempts, so that the same refusal raises one event's count."""
    stem = pod_name(look.job.name, 0, 0).removesuffix("-0-0")
    return re.sub(rf"\b{re.escape(stem)}-\d+-(?=\d)", f"{stem}-*-", said)


def until_released(look: Look) -> float | None:
    """Seconds until an incomplete gang has waited for as long as it may."""
    limit, since = look.job.spec.scheduling.timeout_seconds, asking_since(look)
    if limit is None or since is None or look.status.phase not in (Phase.STARTING, Phase.RESTARTING):
        return None
    left = limit - look.seconds_since(since)
    return left if left > 0 else None


def _refused(look: Look) -> Problem | None:
    problem, pods = look.observed.problem, members(look)
    if problem is None or problem.reason == NAME_TAKEN or _may_pass(look, problem):
        return None
    if any(still_holds(look, pod) for pod in look.observed.pods):
        return None
    there = len(pods) + len(done_and_gone(look))
    if not pods or there >= look.gang_size or _is_enough(look, there):
        return None
    return problem


def _may_pass(look: Look, problem: Problem) -> bool:
    """Whether a pod that was not created will be in a moment: it is retried alone. A webhook that stays silent is a
    refusal, since the gang holds nodes meanwhile."""
    since = asking_since(look)
    recent = since is None or look.seconds_since(since) < TRANSIENT_SECONDS
    return problem.reason == ADMISSION_FAILED and recent


def _not_in_time(look: Look) -> Problem | None:
    limit, since = look.job.spec.scheduling.timeout_seconds, asking_since(look)
    if limit is None or since is None or look.seconds_since(since) < limit:
        return None
    pods = members(look)
    placed = sum(pod.placed for pod in pods) + len(about_to_be_assigned(look)) + len(done_and_gone(look))
    size = look.gang_size
    if placed in (0, size) or _is_enough(look, placed):
        return None
    waiting = next((pod for pod in pods if not pod.placed), None)
    why = f": pod {waiting.name}: {waiting.message}" if waiting is not None and waiting.message else ""
    return Problem(TIMEOUT, f"after {limit} s {placed} of {size} pods had a node{why}")


def _is_enough(look: Look, nodes: int) -> bool:
    elastic = look.job.spec.elastic
    return elastic is not None and nodes >= elastic.min_nodes
