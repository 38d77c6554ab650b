"""Begin the next attempt: new pods or, in place, those that can be kept.

The status goes first. From then on the old attempt is fenced, whatever happens to this process, and what the attempt
is made of is on record: its number, its size, the spec it was made from, and the pods that are kept for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.node_lost import is_lost
from ddpjob_operator.core.gang.elastic import Resize, grace_of_old, next_size, still_saving
from ddpjob_operator.core.gang.in_place import STAYS_SPARE, assign, can_be_kept
from ddpjob_operator.core.gang.members import discard, fill_gang
from ddpjob_operator.core.gang.spares import ready_spares
from ddpjob_operator.core.gang.spec_changes import digests, pods_are_up_to_date
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.stages.finished import plan_refused
from ddpjob_operator.core.transitions import NextAttempt
from ddpjob_operator.core.values.actions import Action, Event, Plan
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodView


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an attempt is over."""

    reason: str
    message: str = ""
    delay: float = 0.0
    """Seconds until the next one may start."""
    size: int | None = None
    """Of how many nodes it is; None where its size does not change for this cause."""


def next_attempt(look: Look, cause: Cause) -> Plan:
    """Begin the next attempt; or fail, if an edit that the API server could not refuse is beyond a bound."""
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return plan_refused(look, admitted)
    message = f"attempt {look.status.attempt} ended: {cause.message or cause.reason}"
    size = cause.size or next_size(look)
    kept = kept_pods(look, size)
    made_from = digests(look.job, look.defaults)
    look = transitions.begin_attempt(look, NextAttempt(size, cause.reason, message, made_from, cause.delay, kept))
    old = tuple(pod for pod in look.observed.pods if pod.name not in kept)
    actions: list[Action] = [*discard(look, old, grace_seconds=grace_of_old(look.status))]
    wait = cause.delay or still_saving(look)
    if not wait:
        actions += fill_gang(look, admitted)
    event = Event("Warning", "Restarting", f"{message.splitlines()[0]}; starting attempt {look.status.attempt}")
    return Plan(
        look.status,
        tuple(actions),
        status_first=True,
        requeue_after=wait or (None if look.observed.service else 0.0),
        events=(event,),
    )


def resize(look: Look, change: Resize) -> Plan:
    """Begin an attempt of another size. Nothing failed, so it costs no budget."""
    look = look.having(recorded(look.status, disruptions=look.status.disruptions + 1))
    decided = next_attempt(look, Cause(change.reason, change.message, size=change.size))
    if decided.status.is_final:
        return decided
    message = f"{change.message}; attempt {decided.status.attempt} has {change.size}"
    return replace(decided, events=(Event("Normal", change.reason, message),))


def resume_attempt(look: Look) -> Plan:
    """Begin an attempt after a suspension, which costs no budget."""
    decided = next_attempt(look, Cause("Resumed", "resumed after a suspension"))
    if decided.status.is_final:
        return decided
    resumed = Event("Normal", "Resumed", f"resumed after a suspension with attempt {decided.status.attempt}")
    return replace(decided, events=(resumed,))


def kept_pods(look: Look, size: int) -> dict[str, int]:
    """The pods that take part in the next attempt, of `size` nodes, and the node ranks that they have in it."""
    if look.job.spec.restart.scope != "InPlace" or not pods_are_up_to_date(look):
        return {}

    def may_stay(pod: PodView) -> bool:
        return not is_lost(pod, look.job.spec.restart, look.now) and pod.node_name not in look.status.excluded_nodes

    survivors = [pod for pod in look.gang if can_be_kept(pod) and may_stay(pod)]
    spares = [pod for pod in ready_spares(look) if may_stay(pod)]
    ranked = assign(survivors, spares, size)
    return ranked | {pod.name: STAYS_SPARE for pod in spares if pod.name not in ranked}
