"""Pods beyond the gang: how many wait, when they are made, and who goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, ended, failed, in_phase, later, make_job, make_pod, seen
from looks import at
from small_cluster import avoided_nodes

from ddpjob_operator.api.status import DDPJobStatus, Phase, SnapshotStatus
from ddpjob_operator.core.failure.node_lost import gone_nodes
from ddpjob_operator.core.gang.members import STAYS_SPARE
from ddpjob_operator.core.gang.spares import spare_actions, wanted
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import AssignPod, CreatePod, CreateService, DeletePod, Plan
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import Creations, Observed, PodView

SPEC: dict[str, Any] = {"nodes": 2, "spares": 2, "restart": {"scope": "InPlace"}}


def status(phase: Phase = Phase.RUNNING, **fields: Any) -> DDPJobStatus:
    made_from = digests(make_job(**SPEC), DEFAULTS)
    snapshot = SnapshotStatus(step=100, time=NOW, verified=True)
    return in_phase(phase, **{"spec_digests": made_from, "snapshot": snapshot, "attempt_start_time": NOW} | fields)


def spare(index: int, phase: str = "Running", attempt: int = 0, **fields: Any) -> PodView:
    running = phase == "Running"
    pod = make_pod(0, phase, attempt, **{"ready": running, "ready_since": NOW if running else None} | fields)
    return replace(pod, name=f"digits-{attempt}-s{index}", uid=f"spare-{attempt}-{index}", node_rank=None)


def words(actions: tuple[object, ...]) -> list[str]:
    found = []
    for action in actions:
        match action:
            case CreatePod(name):
                found.append(f"create {name}")
            case DeletePod(name):
                found.append(f"delete {name}")
            case AssignPod(name, _, attempt, node_rank):
                found.append(f"{name} is {attempt}/{node_rank}")
            case CreateService():
                found.append("look at the Service")
    return sorted(found)


def tend(observed: Observed, known: DDPJobStatus | None = None, **spec: Any) -> list[str]:
    known = known or status()
    return words(spare_actions(at(make_job(known, **SPEC | spec), observed, 60)))


def test_a_spare_keeps_away_from_no_node_that_is_silent() -> None:
    """Nothing would make it anew once the node answers."""
    old = make_pod(9, attempt=0, deleting=True, gone_by=later(-30), not_ready_since=later(-1))
    known = status(attempt=1)
    look = at(make_job(known, **SPEC), seen(make_pod(0, attempt=1), make_pod(1, attempt=1), old, attempt=1), 60)
    assert gone_nodes(look) == {"node-9"}
    created = [action.manifest for action in spare_actions(look) if isinstance(action, CreatePod)]
    assert len(created) == 2
    assert [avoided_nodes(manifest["spec"]) for manifest in created] == [frozenset(), frozenset()]


@pytest.mark.parametrize(
    ("pods", "actions"),
    [
        pytest.param([], ["create digits-0-s0", "create digits-0-s1"], id="none is there"),
        pytest.param([spare(0)], ["create digits-0-s1"], id="one is there"),
        pytest.param([spare(1, "Pending")], ["create digits-0-s0"], id="a gap in the names is filled"),
        pytest.param([spare(0), spare(1, "Pending")], [], id="as many as are wanted"),
        pytest.param([spare(0, "Pending"), spare(1), spare(2)], ["delete digits-0-s0"], id="those that run stay"),
        pytest.param([spare(0), spare(1), spare(2)], ["delete digits-0-s2"], id="the last one goes"),
        pytest.param([spare(0), spare(1, "Failed", termination=ended(1))], ["create digits-0-s2", "delete digits-0-s1"],
                     id="one has failed"),
        pytest.param([spare(0), spare(1, deleting=True)], ["create digits-0-s2"], id="one goes"),
        pytest.param([spare(0), spare(1, not_ready_since=NOW)], ["create digits-0-s2", "delete digits-0-s1"],
                     id="one's node is lost"),
    ],
)  # fmt: skip
def test_as_many_wait_as_are_wanted(pods: list[PodView], actions: list[str]) -> None:
    assert tend(seen(make_pod(0), make_pod(1), *pods)) == actions


def test_a_spare_on_a_node_that_failed_the_job_is_replaced_at_once() -> None:
    """It would get no place: with live recovery no attempt that begins would delete it, either."""
    bad, good = replace(spare(0), node_name="node-7"), spare(1)
    known = status(excluded_nodes=("node-7",))
    assert tend(seen(make_pod(0), make_pod(1), bad, good), known) == ["create digits-0-s2", "delete digits-0-s0"]
    refused = status(excluded_nodes=("node-7",), node_names_refused=True)
    assert tend(seen(make_pod(0), make_pod(1), bad, good), refused) == [], "others are only preferred"


def test_what_was_refused_is_tried_again_with_one_pod() -> None:
    refused = seen(make_pod(0), make_pod(1), problem=Problem("QuotaExceeded", "exceeded quota"))
    assert tend(refused, spares=64) == ["create digits-0-s0"]


def test_a_name_that_a_pod_of_the_gang_still_has_is_not_used_again() -> None:
    called = replace(make_pod(1), name="digits-0-s0")
    assert tend(seen(make_pod(0), called)) == ["create digits-0-s1", "create digits-0-s2"]


def test_they_are_made_right_after_it_is_on_record_that_the_gang_runs() -> None:
    decided = look(status(Phase.STARTING), seen(make_pod(0), make_pod(1)))
    assert (decided.status.phase, decided.actions, decided.requeue_after) == (Phase.RUNNING, (), 0.0)
    assert words(look(decided.status, seen(make_pod(0), make_pod(1))).actions) == [
        "create digits-0-s0",
        "create digits-0-s1",
    ]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
def test_nobody_is_made_to_wait_while_the_gang_itself_lacks_nodes(phase: Phase) -> None:
    assert tend(seen(make_pod(0)), status(phase)) == []


def test_an_operator_that_does_not_know_the_service_asks_for_it_first() -> None:
    assert tend(seen(make_pod(0), make_pod(1), attempt=None)) == ["look at the Service"]


@pytest.mark.parametrize(
    ("spec", "total", "count"),
    [
        pytest.param({}, 2, 2, id="spares"),
        pytest.param({"spares": 0}, 2, 0, id="none"),
        pytest.param({"spares": 0, "nodes": 4, "elastic": {"minNodes": 1}}, 3, 1, id="a node to grow into"),
        pytest.param({"nodes": 4, "elastic": {"minNodes": 1}}, 3, 3, id="both"),
        pytest.param({"spares": 0, "nodes": 2, "elastic": {"minNodes": 1}}, 3, 0, id="a gang that is to shrink"),
    ],
)
def test_who_waits_is_a_spare_or_a_node_to_grow_into(spec: dict[str, Any], total: int, count: int) -> None:
    known = in_phase(Phase.RUNNING, nodes=total)
    assert wanted(at(make_job(known, **SPEC | spec))) == count


def look(known: DDPJobStatus, observed: Observed) -> Plan:
    return plan(make_job(known, **SPEC), observed, NOW, DEFAULTS)


def test_a_spare_takes_the_place_of_what_died_and_nothing_is_made_in_its_way() -> None:
    decided = look(status(), seen(make_pod(0), failed(1, 137), spare(0), spare(1)))
    assert words(decided.actions) == ["delete digits-0-1", "digits-0-0 is 1/0", "digits-0-s0 is 1/1"]
    assert decided.status.internal.kept_pods == {"digits-0-0": 0, "digits-0-s0": 1, "digits-0-s1": STAYS_SPARE}
    called = replace(spare(0), attempt=1, node_rank=1)
    gang = (replace(make_pod(0, attempt=1), name="digits-0-0"), called, spare(1))
    running = look(decided.status, seen(*gang, attempt=1))
    assert (running.status.phase, words(running.actions)) == (Phase.RUNNING, [])
    assert running.status.nodes.spares == 1
    assert words(look(running.status, seen(*gang, attempt=1)).actions) == ["create digits-1-s0"]


def test_a_spare_that_does_not_run_makes_way() -> None:
    decided = look(status(), seen(make_pod(0), failed(1, 137), spare(0, "Pending", scheduled=True)))
    assert words(decided.actions) == [
        "create digits-1-1",
        "delete digits-0-1",
        "delete digits-0-s0",
        "digits-0-0 is 1/0",
    ]


def test_a_spare_of_another_spec_is_replaced_with_all_others() -> None:
    known = status()
    edited = make_job(known, generation=2, **SPEC | {"snapshots": {"every": "5steps"}})
    decided = plan(edited, seen(make_pod(0), failed(1, 137), spare(0)), NOW, DEFAULTS)
    assert "delete digits-0-s0" in words(decided.actions)
    again = plan(make_job(decided.status, generation=2, **SPEC | {"snapshots": {"every": "5steps"}}),
                 seen(spare(0), make_pod(0, attempt=1), make_pod(1, attempt=1), attempt=1), NOW, DEFAULTS)  # fmt: skip
    assert words(again.actions) == ["delete digits-0-s0"], "even if the operator died before it did so"


def test_a_spare_that_died_before_it_was_called_is_replaced_by_a_new_pod() -> None:
    decided = look(status(), seen(make_pod(0), failed(1, 137), spare(0)))
    dead = spare(0, "Failed", termination=ended(137))
    gang = (replace(make_pod(0, attempt=1), name="digits-0-0"), dead)
    again = look(decided.status, seen(*gang, attempt=1))
    assert words(again.actions) == ["create digits-1-1", "delete digits-0-s0"]
    assert again.status.restarts == 1


def test_pods_that_wait_go_when_the_job_is_over() -> None:
    known = status(Phase.SUCCEEDED, completion_time=NOW)
    decided = plan(make_job(known, **SPEC), seen(spare(0), spare(1, "Pending")), NOW, DEFAULTS)
    assert words(decided.actions) == ["delete digits-0-s0", "delete digits-0-s1"]


def test_one_that_vanishes_again_and_again_is_made_after_a_wait_and_no_other_in_its_place() -> None:
    def vanished(seconds: float) -> Observed:
        known = {"digits-0-s0": Creations(4, later(-seconds))}
        return replace(seen(make_pod(0), make_pod(1)), creations=known)

    waiting = look(status(), vanished(1))
    assert words(waiting.actions) == ["create digits-0-s1"]
    assert waiting.requeue_after == 3.0
    assert words(look(status(), vanished(4)).actions) == ["create digits-0-s0", "create digits-0-s1"]
