"""restart.scope InPlace on real nodes: whoever did not die keeps its pod, and the run ends with the same bits."""

from __future__ import annotations

from tests.cluster.conftest import Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.kube import Object
from tests.cluster.scenario import STEPS, Scenario
from tests.cluster.test_failures import FORCE

FIRST_HIT, SECOND_HIT = STEPS // 4, STEPS // 2


def test_a_killed_rank_and_then_the_loss_of_rank_0s_pod_leave_the_other_pod_where_it_is_and_cost_no_bit(
    scenario: Scenario, unbroken: Unbroken
) -> None:
    scenario.train(restart={"scope": "InPlace"})
    saved = {1: scenario.wait_trained(FIRST_HIT)["snapshot"]["step"]}
    first = uid(scenario, 0, attempt=0)
    scenario.kill_rank(1)

    saved[2] = scenario.wait_trained(SECOND_HIT, attempt=1)["snapshot"]["step"]
    assert uid(scenario, 0, attempt=1) == first, "nobody touched the pod of node rank 0"
    assert scenario.pod_name(1, attempt=1) == "digits-1-1"
    second = uid(scenario, 1, attempt=1)
    scenario.delete_pod(0, *FORCE, attempt=1)

    status = scenario.wait_phase("Succeeded")
    assert uid(scenario, 1, attempt=2) == second, "it outlived the pod of node rank 0"
    assert scenario.pod_name(0, attempt=2) == "digits-2-0"
    assert (status["attempt"], status["restarts"]) == (2, 2)
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    records = scenario.records()
    for attempt in (1, 2):
        resumed = records.event("resumed", attempt)
        assert resumed is not None, f"attempt {attempt} began anew: {records.events}"
        assert int(resumed["step"]) in records.snapshots, "it went on from a snapshot"
        assert int(resumed["step"]) >= saved[attempt], "no snapshot that was saved by then is left out"
    assert records.trajectory == unbroken.records.trajectory
    assert records.weights == unbroken.records.weights


def test_a_spare_takes_the_place_of_a_killed_rank_and_costs_no_bit(scenario: Scenario, unbroken: Unbroken) -> None:
    scenario.train(restart={"scope": "InPlace"}, spares=1)
    scenario.history.wait(lambda: is_ready(scenario.history.latest("pods", "digits-0-s0")), "the spare waits")
    before = scenario.wait_trained(FIRST_HIT)
    scenario.kill_rank(1)

    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert status["internal"]["keptPods"]["digits-0-s0"] == 1, "nothing was scheduled or started for it"
    assert nodes_with_two_pods(scenario.history.changes) == []
    records = scenario.records()
    resumed = records.event("resumed", attempt=1)
    assert resumed is not None, records.events
    assert resumed["step"] >= before["snapshot"]["step"]
    assert records.trajectory == unbroken.records.trajectory
    assert records.weights == unbroken.records.weights


def is_ready(pod: Object | None) -> bool:
    conditions = pod["status"].get("conditions", ()) if pod else ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def uid(scenario: Scenario, node_rank: int, attempt: int) -> str:
    pod = scenario.pod(node_rank, attempt)
    assert pod is not None, f"no pod is node rank {node_rank} of attempt {attempt}"
    return str(pod["metadata"]["uid"])
