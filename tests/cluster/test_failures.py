"""A gang that is hit in the middle of training restarts once, and ends with the bits of a run that was left alone."""

from __future__ import annotations

import json
from subprocess import PIPE, Popen
from typing import Any

import pytest
from tests.cluster.conftest import Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.kube import Object
from tests.cluster.scenario import NODES, SEVERAL_HITS, SNAPSHOT_STEPS, STEPS, Records, Scenario
from tests.support.command import beside, to_cluster
from tests.support.waiting import PATIENCE_SECONDS

HITS = (STEPS // 4, STEPS // 2, 3 * STEPS // 4)
"""The steps from which on a job is hit: far from both ends, and from each other."""

SAVING_SECONDS = 120
"""A snapshot that waits for a busy disk may take longer than the default of shutdownSeconds; then ranks are killed."""

FORCE = ("--grace-period=0", "--force")

USER_CODE = """
import nowhere_to_be_found
"""

GREEDY_CODE = """
held = []
while True:
    held.append(b"x" * (64 << 20))
"""


@pytest.mark.fault(28)
def test_each_hit_of_a_gang_costs_one_restart_and_no_bit(scenario: Scenario, unbroken: Unbroken) -> None:
    """One job, a rank of which is killed, and which loses a pod without grace, and then the first one with it."""
    scenario.train(step_seconds=SEVERAL_HITS, shutdownSeconds=SAVING_SECONDS)
    scenario.wait_phase("Running")
    kubectl = scenario.kubectl
    follow = (*beside(), "logs", "--follow", "digits", "--namespace", kubectl.namespace)
    with Popen(follow, env=to_cluster(kubectl.kubeconfig), stdout=PIPE, stderr=PIPE, text=True) as logs:
        assert logs.stdout is not None
        reported = [scenario.wait_trained(HITS[0])]  # meanwhile the command starts
        assert logs.stdout.readline().startswith("[rank ")  # it follows the first attempt
        scenario.kill_rank(0)
        reported.append(scenario.wait_trained(HITS[1], attempt=1))
        scenario.delete_pod(1, *FORCE, attempt=1)
        reported.append(scenario.wait_trained(HITS[2], attempt=2))
        scenario.delete_pod(0, attempt=2)
        status = scenario.wait_phase("Succeeded")
        out, err = logs.communicate(timeout=PATIENCE_SECONDS)
    assert logs.returncode == 0, err
    assert [f"attempt {attempt} begins" in err for attempt in (1, 2, 3)] == [True] * 3, err
    assert f"[rank 0] finished after {STEPS} steps" in out

    assert (status["attempt"], status["restarts"]) == (3, 3)
    assert [(failure["attempt"], failure["podName"], failure["reason"]) for failure in status["failures"]] == [
        (0, "digits-0-0", "WorkerKilled"),
        (1, "digits-1-1", "PodDeleted"),
        (2, "digits-2-0", "PodDeleted"),
    ]
    assert [failure["nodeRank"] for failure in status["failures"]] == [0, 1, 0]
    killed = status["failures"][0]
    assert killed["rank"] == 0
    assert "SIGKILL" in killed["message"]
    assert all(failure["advice"] for failure in status["failures"])
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []

    records = scenario.records()
    assert records.trajectory == unbroken.records.trajectory
    assert records.weights == unbroken.records.weights
    resumed = resumed_steps(records, attempts=3)
    assert resumed[0] % SNAPSHOT_STEPS == 0
    # the pod that was deleted last had its grace, and used it: the gang saved the step that it was at
    assert records.snapshots[resumed[2]]["kind"] == "preempted"
    # what the trainer reported before each hit was on the volume
    assert all(report["snapshot"]["step"] <= step for report, step in zip(reported, resumed, strict=True))
    assert {termination_message(pod)["resumedFromStep"] for pod in scenario.pods(attempt=3)} == {resumed[2]}


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("nodes", "entrypoint"), [(NODES, {"script": "/opt/user/train.py"}), (1, {"module": "nowhere_to_be_found"})]
)
def test_an_import_that_fails_is_not_tried_again(scenario: Scenario, nodes: int, entrypoint: dict[str, str]) -> None:
    scenario.kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"train.py": USER_CODE}}
    )
    code = {"name": "code", "configMap": {"name": "code"}}
    mount = {"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/opt/user"}]}
    template = {"spec": {"volumes": [code], "containers": [mount]}}
    scenario.apply(entrypoint=entrypoint, args=[], nodes=nodes, podTemplate=template)
    status = scenario.wait_phase("Failed")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    assert status["lastFailure"]["reason"] == "ImportError"
    assert "nowhere_to_be_found" in status["lastFailure"]["message"]
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "ImportError")
    assert "nowhere_to_be_found" in failed["message"]
    assert {change.name for change in scenario.history.of("pods")} == {f"digits-0-{rank}" for rank in range(nodes)}


@pytest.mark.fault(23)
def test_a_rank_above_the_memory_limit_is_counted_and_explained(scenario: Scenario) -> None:
    scenario.kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"train.py": GREEDY_CODE}}
    )
    code = {"name": "code", "configMap": {"name": "code"}}
    mount = {"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/opt/user"}]}
    scenario.apply(
        entrypoint={"script": "/opt/user/train.py"},
        args=[],
        nodes=1,
        resources={"limits": {"memory": "1Gi"}},
        restart={"maxRestarts": 1, "backoff": {"initialSeconds": 0}},
        podTemplate={"spec": {"volumes": [code], "containers": [mount]}},
    )
    status = scenario.wait_phase("Failed")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert [failure["reason"] for failure in status["failures"]] == ["OOMKilled", "OOMKilled"]
    assert "raise resources.limits.memory" in status["lastFailure"]["advice"]
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    # with cgroup v2 the kernel ends the launcher too, which then cannot say that no step was made
    assert failed["reason"] in ("RepeatedFailure", "BackoffLimitExceeded")


def resumed_steps(records: Records, attempts: int) -> list[int]:
    """The steps that attempts 1, 2… resumed after: those of snapshots that an earlier attempt had saved, and no step
    before them is of a later one.
    """
    steps = []
    for attempt in range(1, attempts + 1):
        resumed = records.event("resumed", attempt)
        assert resumed, records.events
        steps.append(int(resumed["step"]))
        assert records.snapshots[steps[-1]]["attempt"] < attempt
    trained = [(line["step"], line["attempt"]) for line in records.losses]
    assert trained == [(step, sum(step > resumed for resumed in steps)) for step, _ in trained]
    return steps


def termination_message(pod: Object) -> dict[str, Any]:
    (trainer,) = pod["status"]["containerStatuses"]
    message: dict[str, Any] = json.loads(trainer["state"]["terminated"]["message"])
    return message
