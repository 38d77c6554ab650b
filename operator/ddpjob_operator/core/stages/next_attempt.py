"""A new attempt: the next life of the gang, of new pods or, in place, of those that can live on.

The status goes first. From then on the old attempt is fenced, whatever happens to this process, and what the attempt
is made of is on record: its number, its size, the spec it was made from, and the pods that are kept for it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.failure.node_lost import is_lost
from ddpjob_operator.core.gang.elastic import Resize, grace_of_old, next_size, still_saving
from ddpjob_operator.core.gang.in_place import WAITS, assign, can_live_on
from ddpjob_operator.core.gang.members import complete, discard, gang_of, selector
from ddpjob_operator.core.gang.spares import ready_waiting
from ddpjob_operator.core.gang.spec_changes import are_as_made_now, digests, edited_fields
from ddpjob_operator.core.manifests.bounds import BEYOND
from ddpjob_operator.core.stages.prerequisites import not_allowed
from ddpjob_operator.core.stages.transitions import phase_conditions, plan_failed
from ddpjob_operator.core.values.actions import Action, Event, Plan
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import Observed, PodView


def next_attempt(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    now: datetime,
    defaults: Defaults,
    *,
    delay: float,
    why: str,
    message: str = "",
    size: int | None = None,
) -> Plan:
    """Begin the attempt after that of `status`, `delay` seconds from now, of `size` nodes if that is to change.

    Unless an edit that the API server could not refuse has taken the job beyond a bound: then it has Failed.
    """
    if edited_fields(job, status) and (problems := not_allowed(job, defaults)):
        return plan_failed(job, observed, status, BEYOND, "; ".join(problems), now)
    attempt, size = status.attempt + 1, size or next_size(job, observed, status)
    said = f"attempt {status.attempt} ended: {message or why}"
    kept = kept_pods(job, observed, status, size, now, defaults)
    after = status.model_copy(
        update={
            "phase": Phase.RESTARTING,
            "attempt": attempt,
            "attempt_time": now,
            "restart_at": now + timedelta(seconds=delay) if delay else None,
            "retry_at": None,
            "nodes": NodeCount(ready=0, total=size),
            "selector": selector(job),
            "kept_pods": kept,
            "observed_generation": job.generation,
            "spec_digests": digests(job, defaults),
            "conditions": phase_conditions(job, status, now, restarting=(why, said)),
        }
    )
    going = tuple(pod for pod in observed.pods if pod.name not in kept)
    actions: list[Action] = [*discard(job, going, now, grace_seconds=grace_of_old(after))]
    waits = delay or still_saving(observed, after, now)
    if not waits:
        actions += complete(job, observed, after, (), defaults)
    event = Event("Warning", "Restarting", f"{said.splitlines()[0]}; starting attempt {attempt}")
    return Plan(
        after,
        tuple(actions),
        status_first=True,
        requeue_after=waits or (None if observed.service else 0.0),
        events=(event,),
    )


def resize(
    job: Job, observed: Observed, status: DDPJobStatus, change: Resize, now: datetime, defaults: Defaults
) -> Plan:
    """Begin an attempt of another size. Nothing failed, so it costs no budget."""
    status = status.model_copy(update={"disruptions": status.disruptions + 1})
    decided = next_attempt(
        job, observed, status, now, defaults, delay=0.0, why=change.reason, message=change.message, size=change.size
    )
    if decided.status.is_final:
        return decided
    said = f"{change.message}; attempt {decided.status.attempt} has {change.size}"
    return replace(decided, events=(Event("Normal", change.reason, said),))


def kept_pods(
    job: Job, observed: Observed, status: DDPJobStatus, size: int, now: datetime, defaults: Defaults
) -> dict[str, int]:
    """The pods that live on into the next attempt, and the node ranks that they have in it."""
    if job.spec.restart.scope != "InPlace" or not are_as_made_now(job, status, defaults):
        return {}

    def may_stay(pod: PodView) -> bool:
        return not is_lost(pod, job.spec.restart, now) and pod.node_name not in status.excluded_nodes

    survivors = [pod for pod in gang_of(observed, status) if can_live_on(pod) and may_stay(pod)]
    waiting = [pod for pod in ready_waiting(observed) if may_stay(pod)]
    ranked = assign(survivors, waiting, size)
    return ranked | {pod.name: WAITS for pod in waiting if pod.name not in ranked}
