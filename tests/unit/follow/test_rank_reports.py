"""What pods say of their ranks, through the API server's proxy."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from ddpjob_operator.core.ledger.ranks import PodThrottling
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.core.values.trainer_report import LiveReport, Throttling, read_live
from ddpjob_operator.follow.rank_reports import read_reports
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError


class Pods:
    """The API server's proxy: what the launcher of each pod answers, or the error."""

    def __init__(self, **answers: dict[str, Any] | ApiError) -> None:
        self.answers = answers

    async def bounded(self, path: str, most: int, seconds: float) -> bytes:
        name = path.removeprefix("/api/v1/namespaces/team/pods/").removesuffix(":9400/proxy/status")
        answer = self.answers[name.replace("-", "_")]
        if isinstance(answer, ApiError):
            raise answer
        return json.dumps({"version": 1, "uid": "u", "attempt": 0} | answer).encode()


def pod(name: str, **more: Any) -> PodView:
    return PodView(name, name, 0, 0, PodPhase.RUNNING, **more)


async def test_the_pods_of_a_cluster_are_asked_through_the_api_server() -> None:
    said = [{"rank": 2, "phase": "train", "step": 9, "ageSeconds": 1, "stepSeconds": 0.5, "dataSeconds": 0.1}]
    limit = {"seconds": 60.0, "periods": 600, "throttledPeriods": 380, "throttledSeconds": 45.2}
    found = await read_reports(
        cast(Client, Pods(a={"ranks": said, "throttling": limit}, b={"uid": "another job", "ranks": said})),
        "team", "u", 0, (pod("a", node_name="gpu-1"), pod("b")),
    )  # fmt: skip
    assert [(r.rank, r.pod, r.node, r.phase, r.step, r.step_seconds, r.data_seconds) for r in found.ranks] == [
        (2, "a", "gpu-1", "train", 9, 0.5, 0.1)
    ]
    assert found.throttling == (PodThrottling("a", "gpu-1", Throttling(60.0, 600, 380, 45.2)),)
    assert found.note == ""


async def test_of_live_recovery_the_ranks_that_know_most_are_heard() -> None:
    """A rank that is about to join knows of none yet."""
    none = {"lost": 0, "left": 0, "joined": 0}
    joining = {"ranks": 3, "recoveries": none, "droppedSteps": 0, "last": None}
    others = joining | {"ranks": 2, "recoveries": none | {"lost": 1}, "last": {"kind": "lost", "seconds": 0.2}}
    pods = Pods(a={"worldSize": 3, "live": joining}, b={"worldSize": 3, "live": others}, c={"worldSize": 3})
    found = await read_reports(cast(Client, pods), "team", "u", 0, (pod("a"), pod("b"), pod("c")))
    assert found.live == LiveReport(2, 3, lost=1, last_seconds=0.2)


@pytest.mark.parametrize("missing", ["ranks", "recoveries", "droppedSteps"])
def test_what_is_not_whole_is_not_believed(missing: str) -> None:
    whole: dict[str, Any] = {"ranks": 2, "recoveries": {"lost": 0, "left": 0, "joined": 0}, "droppedSteps": 0}
    assert read_live(whole, 2) == LiveReport(2, 2)
    assert read_live(whole | {missing: -1}, 2) is None
    assert read_live(whole, "2") is None


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ApiError(403, "Forbidden", "no"), "ask for get on pods/proxy"),
        (ApiError(0, "Timeout", "no answer"), "1 of 2 pods do not answer."),
    ],
)
async def test_pods_that_cannot_be_asked_are_said(error: ApiError, note: str) -> None:
    found = await read_reports(
        cast(Client, Pods(a={"ranks": [{"rank": 0}]}, b=error)), "team", "u", 0, (pod("a"), pod("b"))
    )
    assert [rank.rank for rank in found.ranks] == [0]
    assert note in found.note


async def test_where_no_pod_answers_a_network_policy_may_be_why() -> None:
    silent = ApiError(0, "Timeout", "no answer")
    found = await read_reports(cast(Client, Pods(a=silent, b=silent)), "team", "u", 0, (pod("a"), pod("b")))
    assert found.note == "None of 2 pods answers the API server: does a NetworkPolicy keep it out (settings.READERS)?"
