"""A new attempt: the next life of the gang, of new pods or, in place, of those that can live on.

The status goes first. From then on the old attempt is fenced, whatever happens to this process, and what the attempt
is made of is on record: its number, its size, the spec it was made from, and the pods that are kept for it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.assign import assign, can_live_on
from ddpjob_operator.core.edits import are_as_made_now, digests
from ddpjob_operator.core.gang import complete, discard, gang_of
from ddpjob_operator.core.lost import is_lost
from ddpjob_operator.core.model import Action, Defaults, Event, Job, Observed, Plan
from ddpjob_operator.core.phases import phase_conditions


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
) -> Plan:
    """Begin the attempt after that of `status`, `delay` seconds from now."""
    attempt, size = status.attempt + 1, job.spec.nodes
    said = f"attempt {status.attempt} ended: {message or why}"
    kept = kept_pods(job, observed, status, size, now, defaults)
    after = status.model_copy(
        update={
            "phase": Phase.RESTARTING,
            "attempt": attempt,
            "attempt_time": now,
            "restart_at": now + timedelta(seconds=delay) if delay else None,
            "retry_at": None,
            "nodes": NodeCount(ready=0, total=size, summary=f"0/{size}"),
            "kept_pods": kept,
            "observed_generation": job.generation,
            "spec_digests": digests(job, defaults),
            "conditions": phase_conditions(job, status, now, restarting=(why, said)),
        }
    )
    going = tuple(pod for pod in observed.pods if pod.name not in kept)
    actions: list[Action] = [*discard(job, going, now)]
    if not delay:
        actions += complete(job, observed, after, (), defaults)
    event = Event("Warning", "Restarting", f"{said.splitlines()[0]}; starting attempt {attempt}")
    return Plan(
        after,
        tuple(actions),
        status_first=True,
        requeue_after=delay or (None if observed.service else 0.0),
        events=(event,),
    )


def kept_pods(
    job: Job, observed: Observed, status: DDPJobStatus, size: int, now: datetime, defaults: Defaults
) -> dict[str, int]:
    """The pods that live on into the next attempt, and the node ranks that they have in it."""
    if job.spec.restart.scope != "InPlace" or not are_as_made_now(job, status, defaults):
        return {}
    survivors = [
        pod
        for pod in gang_of(observed, status)
        if can_live_on(pod)
        and not is_lost(pod, job.spec.restart, now)
        and pod.node_name not in status.excluded_nodes
    ]
    return assign(survivors, (), size)
