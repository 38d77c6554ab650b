"""The operator may die at any moment: training goes on without it, and what it had begun is finished once."""

from __future__ import annotations

from tests.cluster.conftest import Operator, Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.installation import operator_pod, wait_operator
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import NODES, SEVERAL_HITS, STEPS, Scenario
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


def test_a_job_goes_on_whenever_its_operator_dies_and_each_failure_counts_once(
    scenario: Scenario, operator: Operator, unbroken: Unbroken
) -> None:
    """One job: a rank dies while there is no operator, another one together with it; then the operator dies alone."""
    scenario.train(step_seconds=SEVERAL_HITS)
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

    scenario.wait_trained(STEPS // 2, attempt=1)
    leader = wait_operator(operator.kubectl)
    scenario.kill_rank(1, attempt=1)
    # whether it has seen the failure, has it on record or has begun to act on it: what is left is the next one's
    operator.kubectl.delete("pod", leader, *FORCE)

    scenario.wait_trained(3 * STEPS // 4, attempt=2)
    wait_another(operator.kubectl, kill_operator(operator.kubectl))
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (2, 2), "training does not notice that its operator died"
    first, second = status["failures"]
    assert (first["attempt"], first["rank"], first["reason"]) == (0, 0, "WorkerKilled")
    assert (second["attempt"], second["rank"]) == (1, 1)
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    records = scenario.records()
    assert (records.trajectory, records.weights) == (unbroken.records.trajectory, unbroken.records.weights)
