"""Real nodes that die: training goes on without them and takes them back in, and nothing writes twice.

A node is lost when its Lease was not renewed for the node controller's grace (`--node-monitor-grace-period`,
12 s on the cluster that cluster.sh builds, 40 to 50 s by default); that is most of what the printed seconds are made
of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster.conftest import Operator
from tests.cluster.history import JOB, nodes_with_two_pods, untrue_steps
from tests.cluster.installation import node_lost, wait_operator
from tests.cluster.kube import Object, describe
from tests.cluster.scenario import SNAPSHOT_STEPS, Scenario
from tests.cluster.test_failures import SAVING_SECONDS
from tests.kubernetes import Impossible
from tests.support.command import ddpjob
from tests.support.waiting import CLUSTER_SECONDS, eventually

LONG = 100000
"""Epochs, longer than any test waits: these jobs are deleted, and never finish."""

HIT = 2 * SNAPSHOT_STEPS

QUICK: dict[str, Any] = {"nodeLostSeconds": 1, "backoff": {"initialSeconds": 0}}


@pytest.fixture
def victim(operator: Operator) -> str:
    """A node that the operator does not run on."""
    pod = operator.kubectl.get("pod", wait_operator(operator.kubectl))
    assert pod is not None
    nodes = {node["metadata"]["name"] for node in operator.kubectl.list("nodes")}
    others = sorted(nodes - {pod["spec"]["nodeName"]})
    if not others:
        pytest.skip("the cluster has one node, and the operator runs on it")
    return others[0]


@contextmanager
def lost(node: str, *, power: bool) -> Iterator[float]:
    try:
        with node_lost(node, power=power) as died:
            yield died
    except Impossible as why:
        pytest.skip(str(why))


def test_training_goes_on_without_a_node_that_died_and_takes_it_in_again(
    scenario: Scenario, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.train(
        LONG,
        elastic={"minNodes": 1, "waitSeconds": 3},
        placement={"onePodPerNode": True},
        restart=QUICK | {"scope": "InPlace"},
        shutdownSeconds=SAVING_SECONDS,
    )
    # a volume that takes longer than waitSeconds lets it begin with one node
    before = wait_steps(scenario, nodes=2, beyond=HIT)
    with lost(victim, power=True) as died:
        alone = wait_steps(scenario, nodes=1, beyond=before["snapshot"]["step"])
        seconds = time.time() - died
        assert {node_of(pod) for pod in gang(scenario)}.isdisjoint({victim})
        status = scenario.status
        assert (status["nodes"]["total"], status.get("restarts", 0)) == (1, 0), "a lost node costs no budget"
        assert status["lastFailure"]["reason"] == "NodeLost"
        assert status["lastFailure"]["nodeName"] == victim
    back = time.time()
    together = wait_steps(scenario, nodes=2, beyond=alone["step"])
    assert {node_of(pod) for pod in gang(scenario)} == {victim, *others(scenario, victim)}
    assert together["resumedFromStep"] >= before["snapshot"]["step"], "training never began anew"
    with capsys.disabled():
        print(f"\nfrom the death of a node to the next step on the other: {seconds:.1f} s; "
              f"from its return to the next step on both: {time.time() - back:.1f} s")  # fmt: skip
    of_job = (scenario.name, "--namespace", scenario.kubectl.namespace)
    said = ddpjob(scenario.kubectl.kubeconfig, "scale", *of_job, "--nodes", "1").stdout
    assert said == f"{scenario.name} resumes with 1 node\n"
    scaled = wait_steps(scenario, nodes=1, beyond=together["step"], attempt=together["attempt"] + 1)
    assert scaled["resumedFromStep"] >= together["step"], "it saved a snapshot before it went on with one node"
    assert scenario.status.get("restarts", 0) == 0, "a new size is no failure"
    assert untrue_steps(scenario.statuses) == []
    assert nodes_with_two_pods(scenario.history.changes) == []
    steps = [line["step"] for line in scenario.records().losses]
    assert steps == sorted(set(steps)), "every step is on record once, in order"


@pytest.mark.fault(24)
def test_a_gang_that_loses_a_node_to_a_power_cut_trains_on_elsewhere(
    scenario: Scenario, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the defaults of spec.restart. A pod of the next attempt may be bound to the dead node before it is seen."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {JOB: scenario.name}},
    }
    scenario.train(LONG, podTemplate={"spec": {"topologySpreadConstraints": [spread]}})
    before = scenario.wait_trained(HIT)
    assert victim in {node_of(pod) for pod in gang(scenario)}
    with lost(victim, power=True) as died:
        after = wait_steps(scenario, nodes=2, beyond=before["snapshot"]["step"], attempt=1)
        seconds = time.time() - died
        assert {node_of(pod) for pod in gang(scenario)} == others(scenario, victim)

        def blamed() -> dict[str, Any] | None:
            """The next gang may train before anything but its broken connection tells of the node: then PeerLost."""
            return status if (status := scenario.status)["lastFailure"]["reason"] == "NodeLost" else None

        status = eventually(blamed, "the lost node is the cause", CLUSTER_SECONDS)
    with capsys.disabled():
        print(f"\nfrom the death of a node to the next step of a gang: {seconds:.1f} s")
    assert after["resumedFromStep"] >= before["snapshot"]["step"]
    assert status.get("restarts", 0) == 0, "a lost node costs no budget"
    assert status["disruptions"] == status["attempt"] <= 2
    assert status["lastFailure"]["nodeName"] == victim
    assert untrue_steps(scenario.statuses) == []


@pytest.mark.fault(24)
def test_a_trainer_that_runs_on_unseen_on_a_silent_node_is_refused_by_the_volume(
    scenario: Scenario, victim: str
) -> None:
    away = {"key": "kubernetes.io/hostname", "operator": "In", "values": [victim]}
    prefers = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": {"matchExpressions": [away]}}]
    }
    scenario.train(LONG, nodes=1, restart=QUICK, podTemplate={"spec": {"affinity": {"nodeAffinity": prefers}}})
    before = scenario.wait_trained(HIT)
    zombie = scenario.pod(0, attempt=0)
    assert zombie is not None
    assert node_of(zombie) == victim
    with lost(victim, power=False):
        # far enough for the old trainer to have come to a snapshot meanwhile
        after = scenario.wait_trained(before["snapshot"]["step"] + SNAPSHOT_STEPS + 10, attempt=1)
        assert after["resumedFromStep"] >= before["snapshot"]["step"]
    # its node is back, and tells how the trainer that it had lost sight of has ended
    ended = scenario.history.wait(lambda: ending_of(scenario, "digits-0-0"), "the old pod's end is reported")
    assert ended["exitCode"] == 77, ended
    assert "Fenced" in ended["message"], ended
    records, resumed = scenario.records(), after["resumedFromStep"]
    assert {shot["attempt"] for step, shot in records.snapshots.items() if step > resumed} == {1}
    last = max(line["step"] for line in records.losses if line["attempt"] == 0)
    assert last <= resumed + SNAPSHOT_STEPS, "it got no further than to the snapshot that was refused"
    assert untrue_steps(scenario.statuses) == []


def wait_steps(scenario: Scenario, nodes: int, beyond: int, attempt: int = 0) -> dict[str, Any]:
    """Node rank 0's report once so many nodes, of this or a later attempt, train beyond a step and have a snapshot."""
    seen: list[Any] = [None]

    def trains() -> dict[str, Any] | None:
        status = scenario.status
        if status.get("phase") != "Running" or status["nodes"]["total"] != nodes or status["attempt"] < attempt:
            return None
        seen[0] = report = scenario.report(0, status["attempt"])
        fits = report and report["attempt"] == status["attempt"] and report["worldSize"] == nodes
        is_beyond = fits and report["phase"] == "train" and (report["step"] or 0) > beyond
        return report if is_beyond and report["snapshot"] else None

    what = f"{nodes} nodes train beyond step {beyond}"
    return eventually(trains, what, CLUSTER_SECONDS, lambda: f"last report: {seen[0]}\n{describe(scenario.kubectl)}")


def gang(scenario: Scenario) -> list[Object]:
    return scenario.pods(scenario.status["attempt"])


def node_of(pod: Object) -> str:
    return str(pod["spec"]["nodeName"])


def others(scenario: Scenario, node: str) -> set[str]:
    return {item["metadata"]["name"] for item in scenario.kubectl.list("nodes")} - {node}


def ending_of(scenario: Scenario, pod: str) -> dict[str, Any] | None:
    """How the trainer of a pod ended, whether or not the pod is still there."""
    for change in reversed(scenario.history.of("pods", pod)):
        for container in change.object.get("status", {}).get("containerStatuses") or ():
            if ended := container.get("state", {}).get("terminated"):
                found: dict[str, Any] = ended
                return found
    return None
