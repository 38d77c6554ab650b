"""What is there before the first pod: all of it at once, each once, and nothing without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, UID, in_phase, make_job, seen
from looks import GANG

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreateChild, CreatePod, CreatePVC, CreateService
from ddpjob_operator.core.values.job import Defaults, NetworkAccess, Problem
from ddpjob_operator.core.values.names import group_name
from ddpjob_operator.core.values.observed import Observed

VOLCANO = {"scheduling": {"gang": "Volcano"}}
GROUP = ("scheduling.volcano.sh/v1beta1", group_name("digits", UID, 0))


@pytest.mark.parametrize(
    ("spec", "observed", "made"),
    [
        ({}, Observed(), [CreateService, CreatePVC]),
        (VOLCANO, Observed(), [CreateService, CreatePVC, CreateChild]),
        (VOLCANO, seen(pod_groups=frozenset({GROUP}), attempt=None), [CreateService]),
        (VOLCANO, seen(), [CreateChild]),
        ({"shared": {"claimName": "mine"}}, Observed(), [CreateService]),
        (VOLCANO, seen(pod_groups=frozenset({GROUP})), [CreatePod, CreatePod]),
    ],
    ids=["address and volume", "a group as well", "only what is missing", "no pod without its group",
         "no claim but the user's", "pods when all is there"],
)  # fmt: skip
def test_what_a_new_job_is_given(spec: dict[str, Any], observed: Observed, made: list[type]) -> None:
    assert [type(action) for action in plan(make_job(**spec), observed, NOW, DEFAULTS).actions] == made


def test_what_the_api_server_refuses_is_said_and_holds_the_job_back() -> None:
    problem = Problem("PodGroupMissing", "the API server knows no PodGroup")
    decided = plan(make_job(**VOLCANO), seen(problem=problem), NOW, DEFAULTS)
    assert decided.status.phase is Phase.PENDING
    degraded = cond.find(decided.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert (degraded.reason, degraded.message) == (problem.reason, problem.message)
    assert [type(action) for action in decided.actions] == [CreateChild], "it is asked for again"


ISOLATED = replace(DEFAULTS, network=NetworkAccess("operators"))


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING, Phase.RUNNING])
@pytest.mark.parametrize(
    ("defaults", "spec", "kind"),
    [(ISOLATED, {}, "NetworkPolicy"), (DEFAULTS, VOLCANO, "PodGroup")],
    ids=["the policy", "the group"],
)
def test_what_protects_and_groups_the_pods_is_made_again_in_every_phase(
    phase: Phase, defaults: Defaults, spec: dict[str, Any], kind: str
) -> None:
    job = make_job(in_phase(phase, spec=spec), **spec)
    made = [action for action in plan(job, seen(*GANG), NOW, defaults).actions if isinstance(action, CreateChild)]
    assert [child.manifest["kind"] for child in made] == [kind]
    there = frozenset({(child.manifest["kind"], child.manifest["metadata"]["name"]) for child in made})
    groups = frozenset({(child.manifest["apiVersion"], child.manifest["metadata"]["name"]) for child in made})
    again = plan(job, seen(*GANG, children=there, pod_groups=groups), NOW, defaults).actions
    assert not any(isinstance(action, CreateChild) for action in again)
