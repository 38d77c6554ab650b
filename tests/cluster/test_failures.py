"""A gang that is hit in the middle of training restarts once, and ends with the bits of a run that was left alone."""

from __future__ import annotations

import json
from subprocess import PIPE, Popen
from typing import Any

import pytest
from tests.cluster.conftest import Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.kube import Object
from tests.cluster.scenario import SNAPSHOT_STEPS, STEPS, Records, Scenario
from tests.support.command import beside, to_cluster
from tests.support.waiting import PATIENCE_SECONDS

HIT = STEPS // 3
"""The step from which on a job is hit: far from both ends."""

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
def test_a_killed_rank_costs_one_restart_and_no_bit(scenario: Scenario, unbroken: Unbroken) -> None:
    scenario.train()
    scenario.wait_phase("Running")
    kubectl = scenario.kubectl
    follow = (*beside(), "logs", "--follow", "digits", "--namespace", kubectl.namespace)
    with Popen(follow, env=to_cluster(kubectl.kubeconfig), stdout=PIPE, stderr=PIPE, text=True) as logs:
        assert logs.stdout is not None
        before = scenario.wait_trained(HIT)  # meanwhile the command starts
        assert logs.stdout.readline().startswith("[rank ")  # it follows the first attempt
        scenario.kill_rank(0)
        failure = scenario.wait_phase("Succeeded")["lastFailure"]
        out, err = logs.communicate(timeout=PATIENCE_SECONDS)
    assert (logs.returncode, "attempt 1 begins" in err) == (0, True), err
    assert f"[rank 0] finished after {STEPS} steps" in out
    assert (failure["attempt"], failure["nodeRank"], failure["rank"]) == (0, 0, 0)
    assert (failure["reason"], failure["podName"]) == ("WorkerKilled", "digits-0-0")
    assert "SIGKILL" in failure["message"]
    assert failure["advice"]
    records = assert_same_as(unbroken, scenario)
    resumed = assert_resumed(scenario, records, before)
    assert resumed % SNAPSHOT_STEPS == 0


def test_a_pod_deleted_by_force_costs_one_restart_and_no_bit(scenario: Scenario, unbroken: Unbroken) -> None:
    scenario.train()
    before = scenario.wait_trained(HIT)
    scenario.delete_pod(1, *FORCE)
    failure = scenario.wait_phase("Succeeded")["lastFailure"]
    assert (failure["attempt"], failure["nodeRank"], failure["podName"]) == (0, 1, "digits-0-1")
    assert failure["reason"] == "PodDeleted"
    records = assert_same_as(unbroken, scenario)
    assert_resumed(scenario, records, before)


def test_deleting_the_first_node_costs_one_restart_and_no_bit(scenario: Scenario, unbroken: Unbroken) -> None:
    scenario.train(shutdownSeconds=SAVING_SECONDS)
    before = scenario.wait_trained(HIT)
    scenario.delete_pod(0)
    failure = scenario.wait_phase("Succeeded")["lastFailure"]
    assert (failure["attempt"], failure["nodeRank"], failure["podName"]) == (0, 0, "digits-0-0")
    assert failure["reason"] == "PodDeleted"
    records = assert_same_as(unbroken, scenario)
    resumed = assert_resumed(scenario, records, before)
    # it had its grace, and used it: the gang saved the step that it was at
    assert records.snapshots[resumed]["kind"] == "preempted"


@pytest.mark.fault(30)
@pytest.mark.parametrize("entrypoint", [{"script": "/opt/user/train.py"}, {"module": "nowhere_to_be_found"}])
def test_an_import_that_fails_is_not_tried_again(scenario: Scenario, entrypoint: dict[str, str]) -> None:
    scenario.kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"train.py": USER_CODE}}
    )
    code = {"name": "code", "configMap": {"name": "code"}}
    mount = {"name": "trainer", "volumeMounts": [{"name": "code", "mountPath": "/opt/user"}]}
    template = {"spec": {"volumes": [code], "containers": [mount]}}
    scenario.apply(entrypoint=entrypoint, args=[], podTemplate=template)
    status = scenario.wait_phase("Failed")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    assert status["lastFailure"]["reason"] == "ImportError"
    assert "nowhere_to_be_found" in status["lastFailure"]["message"]
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "ImportError")
    assert "nowhere_to_be_found" in failed["message"]
    assert {change.name for change in scenario.history.of("pods")} == {"digits-0-0", "digits-0-1"}


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


def assert_same_as(unbroken: Unbroken, scenario: Scenario) -> Records:
    """One restart, counted once; the losses of all steps and the final weights are those of the unbroken run."""
    status = scenario.status
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    records = scenario.records()
    assert records.trajectory == unbroken.records.trajectory
    assert records.weights == unbroken.records.weights
    return records


def assert_resumed(scenario: Scenario, records: Records, before: dict[str, Any]) -> int:
    """The step that attempt 1 resumed after: that of a snapshot which attempt 0 saved, and all records agree on it.

    `before` is what the trainer reported before it was hit.
    """
    resumed = records.event("resumed", attempt=1)
    assert resumed, records.events
    step = int(resumed["step"])
    assert records.snapshots[step]["attempt"] == 0
    assert before["snapshot"]["step"] <= step < STEPS
    assert {line["attempt"] for line in records.losses if line["step"] <= step} == {0}
    assert {line["attempt"] for line in records.losses if line["step"] > step} == {1}
    assert {termination_message(pod)["resumedFromStep"] for pod in scenario.pods(attempt=1)} == {step}
    return step


def termination_message(pod: Object) -> dict[str, Any]:
    (trainer,) = pod["status"]["containerStatuses"]
    message: dict[str, Any] = json.loads(trainer["state"]["terminated"]["message"])
    return message
