"""What a gang relies on besides its pods, and what is done when somebody deletes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import DEFAULTS, NOW, in_phase, make_job, make_pod, seen
from looks import GANG, kinds, look

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import CreateChild, CreatePVC, CreateService, PointService
from ddpjob_operator.core.values.job import NetworkAccess, Problem

CLOSED = replace(DEFAULTS, network=NetworkAccess("ddpjob-system"))
CHILDREN = frozenset({("NetworkPolicy", "digits"), ("PodGroup", "digits")})
VOLCANO = {"scheduling": {"gang": "Volcano"}}


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING, Phase.RUNNING])
def test_what_a_gang_relies_on_is_created_again_in_every_phase_that_has_pods(phase: Phase) -> None:
    job = make_job(in_phase(phase, spec=VOLCANO), **VOLCANO)
    decided = plan(job, seen(*GANG, attempt=None, pvc_exists=False, address="10.96.0.7"), NOW, CLOSED)
    assert kinds(decided) == [CreateService, CreatePVC, CreateChild, CreateChild]
    service = decided.actions[0]
    assert isinstance(service, CreateService)
    assert service.manifest["spec"]["clusterIP"] == "10.96.0.7", "the pods that run have this address"
    assert plan(job, seen(*GANG, children=CHILDREN), NOW, CLOSED).actions == ()


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
