"""What a gang relies on besides its pods: its Service, its claim, its NetworkPolicies and its PodGroup.

All of it is made before the pods and kept while they are there: without its policies a job's ports are open, without
its Service no rank that starts finds the others, without its claim no pod can start.
"""

from __future__ import annotations

from ddpjob_operator.core.gang.members import current_group
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.allow_lists import may_see_whole_claims
from ddpjob_operator.core.manifests.network_policy import build_policies
from ddpjob_operator.core.manifests.pod_group import build_pod_group
from ddpjob_operator.core.manifests.pods import build_pvc, build_service, rendezvous_selector
from ddpjob_operator.core.values.actions import (
    Action,
    CreateChild,
    CreatePVC,
    CreateService,
    DeletePodGroup,
    PointService,
)
from ddpjob_operator.core.values.job import Manifest
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import service_name


def create_service(look: Look, admitted: Admitted) -> CreateService:
    """Create the Service, at the address that it has had."""
    return CreateService(build_service(admitted, look.status.attempt, look.observed.address))


def missing_children(look: Look, admitted: Admitted) -> tuple[Action, ...]:
    """Create the claim, the policies and the group that the job is to have and that are not known to be there."""
    claim = build_pvc(admitted)
    missing: tuple[Action, ...] = (*missing_policies(look, admitted), *missing_group(look, admitted))
    if claim is None or look.observed.pvc_exists:
        return missing
    # one that has begun is not stopped by a bound that came later
    is_new = look.status.internal.spec_digests is None
    return (CreatePVC(claim, only_own=is_new and not may_see_whole_claims(look.defaults.bounds)), *missing)


def missing_group(look: Look, admitted: Admitted) -> tuple[CreateChild, ...]:
    """The PodGroup of the current attempt, unless it is known to be there."""
    group = build_pod_group(admitted, current_group(look))
    if group is None or (group["apiVersion"], group["metadata"]["name"]) in look.observed.pod_groups:
        return ()
    return (CreateChild(group),)


def old_groups(look: Look) -> tuple[DeletePodGroup, ...]:
    """The PodGroups of earlier attempts."""
    if not look.observed.pod_groups:
        return ()
    current = current_group(look)
    return tuple(group for group in all_groups(look) if group.name != current)


def all_groups(look: Look) -> tuple[DeletePodGroup, ...]:
    """For a job that has no use for them. Volcano reserves what a group asks for as long as it is there."""
    return tuple(DeletePodGroup(version, name) for version, name in sorted(look.observed.pod_groups))


def missing_policies(look: Look, admitted: Admitted) -> tuple[CreateChild, ...]:
    """The policies alone."""
    return tuple(CreateChild(policy) for policy in build_policies(admitted) if not _is_known(look, policy))


def lost_children(look: Look) -> tuple[Action, ...]:
    """The same for a job that has its pods, and its Service, which selects node rank 0 of their attempt."""
    observed, spec = look.observed, look.job.spec
    if observed.service is not None and observed.service.attempt != look.status.attempt:
        attempt = look.status.attempt
        return (PointService(service_name(look.job.name), attempt, rendezvous_selector(look.job, attempt)),)
    has_service = observed.service is not None or observed.service_exists
    has_claim = observed.pvc_exists or spec.shared.claim_name is not None
    may_lack_more = look.defaults.network is not None or spec.scheduling.gang in ("Coscheduling", "Volcano")
    if has_service and has_claim and not may_lack_more:
        return ()
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return ()
    missing = missing_children(look, admitted)
    return missing if has_service else (create_service(look, admitted), *missing)


def _is_known(look: Look, child: Manifest) -> bool:
    return (child["kind"], child["metadata"]["name"]) in look.observed.children
