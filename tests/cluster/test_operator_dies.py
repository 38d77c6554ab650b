"""The operator may die at any moment: training goes on without it, and what it had begun is finished once."""

from __future__ import annotations

from tests.cluster.conftest import Operator, Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.installation import operator_pod, wait_operator
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import NODES, STEPS, Scenario
from tests.support.waiting import CLUSTER_SECONDS, eventually

FORCE = ("--grace-period=0", "--force")


def kill_operator(kubectl: Kubectl) -> str:
    """Delete the operator's pod without any grace; its name."""
    pod = wait_operator(kubectl)
    kubectl.delete("pod", pod, *FORCE)
    return pod


def wait_another(kubectl: Kubectl, pod: str) -> str:
    """Name of the operator's pod that came after `pod`, once it is ready."""

    def other() -> str | None:
        name = operator_pod(kubectl)
        return name if name != pod else None

    return eventually(
        other,
        f"another operator follows {pod}",
        CLUSTER_SECONDS,
        lambda: kubectl.run("get", "pods", "-o", "wide", check=False).stdout,
    )


def test_training_does_not_notice_that_the_operator_died(
    scenario: Scenario, operator: Operator, unbroken: Unbroken
) -> None:
    scenario.train()
    scenario.wait_phase("Running")
    scenario.wait_trained(STEPS // 8)
    wait_another(operator.kubectl, kill_operator(operator.kubectl))
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    assert scenario.records().weights == unbroken.records.weights


def test_an_operator_that_dies_together_with_a_rank_is_followed_by_one_that_counts_one_restart(
    scenario: Scenario, operator: Operator, unbroken: Unbroken
) -> None:
    scenario.train()
    scenario.wait_trained(STEPS // 3)
    leader = wait_operator(operator.kubectl)
    scenario.kill_rank(1)
    # whether it has seen the failure, has it on record or has begun to act on it: what is left is the next one's
    operator.kubectl.delete("pod", leader, *FORCE)
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert status["lastFailure"]["rank"] == 1
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    records = scenario.records()
    assert (records.trajectory, records.weights) == (unbroken.records.trajectory, unbroken.records.weights)


def test_a_gang_that_breaks_while_there_is_no_operator_restarts_when_it_is_back(
    scenario: Scenario, operator: Operator, unbroken: Unbroken
) -> None:
    scenario.train()
    # early, because training goes on while the operator leaves
    scenario.wait_trained(STEPS // 8)
    leader = wait_operator(operator.kubectl)
    operator.kubectl.run("scale", "deployment", "--all", "--replicas=0")
    operator.kubectl.delete("pod", leader, *FORCE)
    try:
        eventually(lambda: not operator.kubectl.list("pods"), "the operator is gone")
        scenario.kill_rank(0)
        failed = ("Failed", "Succeeded")
        scenario.history.wait(
            lambda: [pod["status"]["phase"] in failed for pod in scenario.pods(0)] == [True] * NODES,
            "all pods of the attempt have ended",
        )
    finally:
        operator.kubectl.run("scale", "deployment", "--all", "--replicas=1")
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 1)
    assert (status["lastFailure"]["reason"], status["lastFailure"]["rank"]) == ("WorkerKilled", 0)
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    assert scenario.records().weights == unbroken.records.weights
