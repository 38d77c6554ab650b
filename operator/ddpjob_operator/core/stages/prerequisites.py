"""What a job has before its first pod: the address of its rendezvous, its volume, and whatever else its pods rely on.

A NetworkPolicy that comes after the pods would leave them open for a moment, and a PodGroup that does would leave
them to be scheduled one by one. All of it is made at once; the API server's refusal of any holds the job back.
"""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.gang.startup_problems import find_trouble
from ddpjob_operator.core.manifests.bounds import bound_violations
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.network_policy import build_policy
from ddpjob_operator.core.manifests.pod_group import build_pod_group
from ddpjob_operator.core.manifests.pods import build_claim, build_pod, build_service, owner_reference
from ddpjob_operator.core.stages.transitions import degraded
from ddpjob_operator.core.values.actions import Action, CreateChild, CreateClaim, CreateService, Plan
from ddpjob_operator.core.values.job import Defaults, Job, Manifest
from ddpjob_operator.core.values.observed import Observed, ServiceView


def plan_preparation(
    job: Job, observed: Observed, status: DDPJobStatus, now: datetime, defaults: Defaults
) -> Plan | None:
    """Make what is missing; None once everything is there."""
    actions = _missing(job, observed, status, defaults)
    if not actions:
        return None
    if (trouble := find_trouble(status, (), observed.problem, now)) is None:
        return Plan(status, actions)
    status = status.model_copy(update={"phase": Phase.PENDING, "start_time": status.start_time or now})
    return Plan(degraded(job, status, trouble.reason, trouble.message, now), actions)


def not_allowed(job: Job, defaults: Defaults) -> tuple[str, ...]:
    """Every bound of the administrator's that the job breaks, in words for its author."""
    pods = [build_pod(job, attempt=0, node_rank=0, service=ServiceView(host="", attempt=0), defaults=defaults)]
    if job.spec.initializers:
        pods.append(build_initializer(job, 0, defaults))
    return bound_violations(job, tuple(pods), defaults.bounds)


def _missing(job: Job, observed: Observed, status: DDPJobStatus, defaults: Defaults) -> tuple[Action, ...]:
    actions: list[Action] = []
    if observed.service is None:
        actions.append(CreateService(build_service(job, status.attempt)))
    claim = build_claim(job)
    if claim is not None and not observed.claim_exists:
        actions.append(CreateClaim(claim))
    known = observed.children
    actions += [
        CreateChild(child)
        for child in _children(job, defaults)
        if (child["kind"], child["metadata"]["name"]) not in known
    ]
    return tuple(actions)


def _children(job: Job, defaults: Defaults) -> tuple[Manifest, ...]:
    owner = owner_reference(job)
    found = (build_policy(job, defaults, owner), build_pod_group(job, owner))
    return tuple(child for child in found if child is not None)
