"""The rules that every scenario is held to do notice what they are for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.history import ATTEMPT, NODE_RANK, UID, Change, nodes_with_two_pods, untrue_steps


def pod(name: str, uid: str, attempt: int, node_rank: int, *, type_: str = "ADDED") -> Change:
    labels = {UID: "job", ATTEMPT: str(attempt), NODE_RANK: str(node_rank)}
    return Change(0.0, "pods", type_, {"metadata": {"name": name, "uid": uid, "labels": labels}})


def test_a_gang_and_the_one_after_it_are_one_pod_a_node() -> None:
    pods = [pod("digits-0-0", "a", 0, 0), pod("digits-0-1", "b", 0, 1), pod("digits-1-0", "c", 1, 0)]
    assert nodes_with_two_pods([*pods, pod("digits-0-0", "a", 0, 0, type_="MODIFIED")]) == []


@pytest.mark.parametrize("name", ["digits-0-1", "digits-0-1-x7k2p"], ids=["created again", "under another name"])
def test_a_second_pod_of_one_node_is_noticed_though_the_first_is_gone(name: str) -> None:
    pods = [pod("digits-0-1", "b", 0, 1), pod("digits-0-1", "b", 0, 1, type_="DELETED"), pod(name, "c", 0, 1)]
    assert nodes_with_two_pods(pods) == ["attempt 0, node rank 1: 2 pods"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"attempt": 1, "restarts": 2}, "from (0, 0) to (1, 2)"),
        ({"attempt": 2, "restarts": 2}, "from (0, 0) to (2, 2)"),
        ({"attempt": 0, "restarts": 1}, "from (0, 0) to (0, 1)"),
        ({"phase": "Running"}, "from Succeeded to Running"),
    ],
)
def test_a_status_that_contradicts_itself_is_noticed(after: dict[str, Any], said: str) -> None:
    (wrong,) = untrue_steps([{"phase": "Succeeded"}, {"phase": "Succeeded"} | after])
    assert wrong.endswith(said)


def test_a_restart_and_a_new_attempt_after_an_edit_are_true_steps() -> None:
    first, restarted = {"attempt": 0, "restarts": 0}, {"attempt": 1, "restarts": 1}
    assert untrue_steps([first, first, restarted, {"attempt": 2, "restarts": 1}]) == []


def test_a_restart_is_taken_back_only_where_it_becomes_a_disruption() -> None:
    restarted: dict[str, Any] = {"attempt": 1, "restarts": 1, "lastFailure": {"reason": "PeerLost"}}
    disrupted = {"attempt": 1, "restarts": 0, "disruptions": 1, "lastFailure": {"reason": "NodeLost"}}
    assert untrue_steps([restarted, disrupted]) == []
    assert len(untrue_steps([restarted, disrupted | {"lastFailure": restarted["lastFailure"]}])) == 1
    assert len(untrue_steps([restarted, disrupted | {"disruptions": 0}])) == 1
