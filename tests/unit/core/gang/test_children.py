"""What a gang relies on besides its pods, and what is done when somebody deletes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, UID, failed, in_phase, make_job, make_pod, seen, succeeded
from looks import GANG, kinds, look

from ddpjob_operator.api.status import Phase, SnapshotStatus
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import (
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeletePodGroup,
    PointService,
)
from ddpjob_operator.core.values.job import Bounds, NetworkAccess, Problem
from ddpjob_operator.core.values.names import group_name

CLOSED = replace(DEFAULTS, network=NetworkAccess("ddpjob-system"))
CHILDREN = frozenset({("NetworkPolicy", "digits")})
GROUPS = frozenset({("scheduling.volcano.sh/v1beta1", group_name("digits", UID, 0))})
VOLCANO = {"scheduling": {"gang": "Volcano"}}


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING, Phase.RUNNING])
def test_what_a_gang_relies_on_is_created_again_in_every_phase_that_has_pods(phase: Phase) -> None:
    job = make_job(in_phase(phase, spec=VOLCANO), **VOLCANO)
    decided = plan(job, seen(*GANG, attempt=None, pvc_exists=False, address="10.96.0.7"), NOW, CLOSED)
    assert kinds(decided) == [CreateService, CreatePVC, CreateChild, CreateChild]
    service = decided.actions[0]
    assert isinstance(service, CreateService)
    assert service.manifest["spec"]["clusterIP"] == "10.96.0.7", "the pods that run have this address"
    members = [replace(pod, group=of_attempt(0)[1]) for pod in GANG]
    assert plan(job, seen(*members, children=CHILDREN, pod_groups=GROUPS), NOW, CLOSED).actions == ()


@pytest.mark.parametrize(
    ("scopes", "only_own"), [(None, False), (("Claim", "Job"), False), (("*",), False), (("Job",), True)], ids=str
)
def test_a_new_job_takes_no_claim_that_was_not_made_for_it_where_it_may_not_see_all_of_any(
    scopes: tuple[str, ...] | None, *, only_own: bool
) -> None:
    bounds = Bounds(allowed={} if scopes is None else {"sharedScopes": scopes})
    bounded = replace(DEFAULTS, bounds=bounds)
    new = plan(make_job(), seen(attempt=None, pvc_exists=False), NOW, bounded)
    assert [action.only_own for action in new.actions if isinstance(action, CreatePVC)] == [only_own]
    begun = plan(make_job(in_phase(Phase.RUNNING)), seen(*GANG, pvc_exists=False), NOW, bounded)
    assert [action.only_own for action in begun.actions if isinstance(action, CreatePVC)] == [False]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING])
def test_pods_of_version_0_1_0_keep_their_group_which_no_label_of_theirs_names(phase: Phase) -> None:
    spec: dict[str, Any] = VOLCANO | {"restart": {"scope": "InPlace"}}
    status = in_phase(phase, spec=spec, spec_digests=digests(make_job(**spec), DEFAULTS))
    group = frozenset({("scheduling.volcano.sh/v1beta1", "digits")})
    assert look(make_job(status, **spec), seen(*GANG, pod_groups=group)).actions == ()
    decided = look(make_job(status, **spec), seen(make_pod(0), failed(1, 137), pod_groups=group))
    kept = look(make_job(decided.status, **spec), seen(make_pod(0), pod_groups=group), 600)
    (pod,) = (action.manifest for action in kept.actions if isinstance(action, CreatePod))
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "digits"
    assert DeletePodGroup not in kinds(kept)


def of_attempt(attempt: int) -> tuple[str, str]:
    return ("scheduling.volcano.sh/v1beta1", group_name("digits", UID, attempt))


def test_each_attempt_has_a_group_of_its_own_so_that_pods_of_the_last_one_do_not_count_as_its_members() -> None:
    """As one on a lost node, which stays: the schedulers would bind others before all of them fit."""
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    job = make_job(in_phase(Phase.RUNNING, spec=VOLCANO, snapshot=snapshot), **VOLCANO)
    old = failed(0, 137, group=of_attempt(0)[1]), make_pod(1, group=of_attempt(0)[1])
    decided = look(job, seen(*old, pod_groups=GROUPS))
    made = [action.manifest["metadata"]["name"] for action in decided.actions if isinstance(action, CreateChild)]
    assert made == [of_attempt(1)[1]]
    assert CreatePod not in kinds(decided), "they come when it is there"
    both = frozenset({of_attempt(0), of_attempt(1)})
    again = look(replace(job, status=decided.status), seen(*old, pod_groups=both))
    assert DeletePodGroup(*of_attempt(0)) in again.actions
    joined = [action.manifest["metadata"] for action in again.actions if isinstance(action, CreatePod)]
    assert [pod["annotations"]["scheduling.k8s.io/group-name"] for pod in joined] == [of_attempt(1)[1]] * 2


def test_a_pod_in_the_place_of_a_lost_one_is_a_member_of_the_group_of_those_that_stay() -> None:
    spec: dict[str, Any] = VOLCANO | {"restart": {"scope": "InPlace"}}
    made_from = digests(make_job(**spec), DEFAULTS)
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    status = in_phase(Phase.RUNNING, snapshot=snapshot, spec_digests=made_from)
    pods = make_pod(0, group=of_attempt(0)[1]), failed(1, 137, group=of_attempt(0)[1])
    decided = look(make_job(status, **spec), seen(*pods, pod_groups=GROUPS))
    (pod,) = (action.manifest for action in decided.actions if isinstance(action, CreatePod))
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == of_attempt(0)[1]
    assert not {CreateChild, DeletePodGroup}.intersection(kinds(decided))


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.SUCCEEDED, Phase.SUSPENDED])
def test_a_job_that_has_no_pods_any_more_gives_back_what_its_group_has_reserved(phase: Phase) -> None:
    over = phase is not Phase.SUSPENDED
    status = in_phase(phase, spec=VOLCANO, completion_time=NOW if over else None)
    job = make_job(status, suspend=not over, **VOLCANO)
    assert look(job, seen(pod_groups=GROUPS, attempt=None)).actions == (DeletePodGroup(*of_attempt(0)),)
    assert look(job, seen(attempt=None)).actions == ()


def test_a_group_stays_while_a_pod_of_a_job_that_is_over_runs_on() -> None:
    status = in_phase(Phase.SUCCEEDED, spec=VOLCANO, completion_time=NOW)
    job = make_job(status, cleanPodPolicy="None", successPolicy="FirstNode", **VOLCANO)
    assert look(job, seen(succeeded(0), make_pod(1), pod_groups=GROUPS)).actions == ()
    lost = make_pod(1, deleting=True)
    assert look(job, seen(succeeded(0), lost, pod_groups=GROUPS)).actions == (DeletePodGroup(*of_attempt(0)),)


def test_pods_of_two_groups_are_no_gang_so_all_are_made_anew_in_one() -> None:
    """As after a creation whose answer was lost while the pod died whose group it joined."""
    status = in_phase(Phase.RESTARTING, spec=VOLCANO, attempt=1, spec_digests=digests(make_job(**VOLCANO), DEFAULTS))
    first, other = (make_pod(rank, "Pending", attempt=1, group=of_attempt(1 - rank)[1]) for rank in range(2))
    groups = frozenset({of_attempt(1)})
    decided = look(make_job(status, **VOLCANO), seen(first, other, attempt=1, pod_groups=groups))
    assert (decided.status.attempt, decided.status.restarts) == (2, 0)
    alike = replace(other, group=first.group)
    waits = look(make_job(status, **VOLCANO), seen(first, alike, attempt=1, pod_groups=groups))
    assert waits.status.attempt == 1


def test_no_pod_is_created_before_the_policy_that_protects_it() -> None:
    job = make_job(in_phase(Phase.RESTARTING))
    assert kinds(plan(job, seen(make_pod(0)), NOW, CLOSED)) == [CreateChild]
    refused = plan(job, seen(problem=Problem("Forbidden", "no policies here")), NOW, CLOSED)
    assert "no policies here" in [item.message for item in refused.status.conditions]


@pytest.mark.parametrize(("policy", "made"), [("None", [CreateChild]), ("All", [])])
def test_pods_that_outlive_their_job_keep_their_policy(policy: str, made: list[type]) -> None:
    over = in_phase(Phase.FAILED, completion_time=NOW)
    decided = plan(make_job(over, cleanPodPolicy=policy), seen(make_pod(0), attempt=None), NOW, CLOSED)
    assert [kind for kind in kinds(decided) if kind is CreateChild] == made


def test_a_service_that_was_created_from_an_old_status_is_pointed_at_the_attempt_that_runs() -> None:
    pods = (make_pod(0, attempt=2), make_pod(1, attempt=2))
    decided = look(make_job(in_phase(Phase.RUNNING, attempt=2)), seen(*pods, attempt=1))
    assert kinds(decided) == [PointService]
