"""The rules to which a recorded history is held do notice what they are for."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from tests.api_server.history import ATTEMPT, NODE_RANK, UID, Change, History

VERSIONS = count(1)


def job(**status: Any) -> Change:
    meta = {"uid": "job", "resourceVersion": str(next(VERSIONS))}
    return Change("ddpjobs", "MODIFIED", {"metadata": meta, "status": status})


def pod(uid: str, attempt: int, node_rank: int | str, *, type_: str = "ADDED", phase: str = "Running") -> Change:
    labels = {UID: "job", ATTEMPT: str(attempt), NODE_RANK: str(node_rank)}
    meta = {"name": f"digits-{uid}", "uid": uid, "labels": labels, "resourceVersion": str(next(VERSIONS))}
    return Change("pods", type_, {"metadata": meta, "status": {"phase": phase}})


def test_a_restart_that_is_on_record_before_its_pods_breaks_no_rule() -> None:
    history = History([
        job(attempt=0, phase="Starting"), pod("a", 0, 0), pod("b", 0, 1),
        pod("spare", 0, "none"), pod("more", 0, "none"),
        job(attempt=1, restarts=1, phase="Restarting"),
        pod("a", 0, 0, type_="MODIFIED", phase="Failed"), pod("b", 0, 1, type_="DELETED"),
        pod("c", 1, 0), pod("spare", 1, 1, type_="MODIFIED"),
        job(attempt=2, restarts=1, phase="Starting"), pod("c", 1, 0, type_="DELETED"), pod("d", 2, 0),
        job(attempt=2, restarts=1, phase="Succeeded"), job(attempt=2, restarts=1, phase="Succeeded"),
    ])  # fmt: skip
    assert history.broken_rules() == []
    assert history.made_again() == []


TWICE = ["attempt 0, node rank 1 had two pods at once"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        pytest.param([pod("b", 0, 1)], TWICE, id="created twice"),
        pytest.param([pod("b", 0, "none"), pod("b", 0, 1, type_="MODIFIED")], TWICE, id="a spare that took its place"),
        pytest.param([pod("a", 0, 1, type_="DELETED"), pod("b", 0, 1)], [], id="after the first was gone"),
        pytest.param([pod("a", 0, 1, phase="Failed"), pod("b", 0, 1)], [], id="after the first had ended"),
        pytest.param([pod("b", 0, 0)], [], id="another node rank"),
    ],
)
def test_two_pods_of_one_node_at_once_are_noticed(second: list[Change], said: list[str]) -> None:
    assert History([pod("a", 0, 1), *second]).broken_rules() == said


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"attempt": 3, "restarts": 1}, "attempt 1 -> 3, restarts 1 -> 1"),
        ({"attempt": 0, "restarts": 1}, "attempt 1 -> 0, restarts 1 -> 1"),
        ({"attempt": 2, "restarts": 3}, "attempt 1 -> 2, restarts 1 -> 3"),
        ({"attempt": 1, "restarts": 2}, "attempt 1 -> 1, restarts 1 -> 2"),
        ({"attempt": 1, "restarts": 0}, "attempt 1 -> 1, restarts 1 -> 0"),
    ],
)
def test_an_attempt_that_is_skipped_and_a_restart_that_is_miscounted_are_noticed(
    after: dict[str, int], said: str
) -> None:
    assert History([job(attempt=1, restarts=1), job(**after)]).broken_rules() == [said]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_job_that_is_over_and_goes_on_is_noticed(phase: str) -> None:
    history = History([job(phase=phase), job(phase="Running")])
    assert history.broken_rules() == [f"the phase went from {phase} to Running"]


@pytest.mark.parametrize(
    "early",
    [[pod("b", 1, 0)], [pod("b", 0, 0), pod("b", 1, 0, type_="MODIFIED")]],
    ids=["made for it", "assigned to it"],
)
def test_a_pod_of_an_attempt_that_is_not_on_record_is_noticed(early: list[Change]) -> None:
    said = ["digits-b was in attempt 1 before that attempt was on record"]
    assert History([*early, job(attempt=1, restarts=1)]).broken_rules() == said
    assert History(early).broken_rules() == said, "it never was"


def test_a_pod_that_is_made_again_is_noticed_though_the_first_was_gone() -> None:
    history = History([pod("a", 0, 1), pod("a", 0, 1, type_="DELETED"), pod("b", 0, 1)])
    assert history.made_again() == ["attempt 0, node rank 1 had 2 pods"]
