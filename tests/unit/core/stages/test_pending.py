"""What is there before the first pod: all of it at once, each once, and nothing without it."""

from __future__ import annotations

from typing import Any

import pytest
from builders import DEFAULTS, NOW, make_job, seen

from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreateChild, CreatePod, CreatePVC, CreateService
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import Observed

VOLCANO = {"scheduling": {"gang": "Volcano"}}
GROUP = ("PodGroup", "digits")


@pytest.mark.parametrize(
    ("spec", "observed", "made"),
    [
        ({}, Observed(), [CreateService, CreatePVC]),
        (VOLCANO, Observed(), [CreateService, CreatePVC, CreateChild]),
        (VOLCANO, seen(children=frozenset({GROUP}), attempt=None), [CreateService]),
        (VOLCANO, seen(), [CreateChild]),
        ({"shared": {"claimName": "mine"}}, Observed(), [CreateService]),
        (VOLCANO, seen(children=frozenset({GROUP})), [CreatePod, CreatePod]),
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
