"""What is left of a job that is deleted, and what becomes of it when it is applied again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.cluster.conftest import Unbroken
from tests.cluster.kube import Kubectl, describe
from tests.cluster.scenario import STEPS, Scenario
from tests.support.waiting import CLUSTER_SECONDS, eventually

TOKEN = "secret/default-token-"
"""Before Kubernetes 1.24 each namespace has one, under a name of its own."""


@pytest.fixture
def empty(new_namespace: Callable[[str], Kubectl]) -> Iterator[Kubectl]:
    """A namespace that shows what the cluster itself puts into every one."""
    kubectl = new_namespace("empty")
    yield kubectl
    kubectl.delete("namespace", kubectl.namespace)


@pytest.mark.parametrize(("retain", "left"), [(True, {"persistentvolumeclaim/digits-shared"}), (False, set())])
def test_a_deleted_job_leaves_nothing_but_a_volume_that_it_was_to_retain(
    scenario: Scenario, empty: Kubectl, retain: bool, left: set[str]
) -> None:
    scenario.apply(args=["--task=digits", "--epochs=1000"], shared={"retain": retain})
    scenario.wait_phase("Running")
    scenario.kubectl.delete("ddpjob", "digits")
    # all there is takes dozens of requests to list
    scenario.history.wait(lambda: scenario.history.present("pods") == [], "its pods are gone")
    eventually(
        lambda: everything(scenario.kubectl) - everything(empty) == left,
        f"nothing is left but {left or 'nothing'}",
        CLUSTER_SECONDS,
        lambda: f"left: {everything(scenario.kubectl) - everything(empty)}\n{describe(scenario.kubectl)}",
    )


def test_a_job_applied_again_resumes_from_the_volume_of_the_deleted_job(scenario: Scenario, unbroken: Unbroken) -> None:
    scenario.train()
    before = scenario.wait_trained(STEPS // 3)
    former = scenario.job["metadata"]["uid"]
    # its pods may still be saving when the next job begins under the same names
    scenario.kubectl.delete("ddpjob", "digits")
    scenario.history.wait(lambda: scenario.history.latest("ddpjobs", "digits") is None, "the job is gone")
    scenario.train()
    status = scenario.wait_phase("Succeeded")
    assert (status["attempt"], status["restarts"]) == (0, 0)
    records = scenario.records()
    resumed = records.event("resumed", attempt=0)
    assert resumed, records.events
    assert resumed["step"] >= before["snapshot"]["step"]
    assert records.snapshots[resumed["step"]]["uid"] == former
    assert (records.trajectory, records.weights) == (unbroken.records.trajectory, unbroken.records.weights)


def everything(kubectl: Kubectl) -> set[str]:
    """All objects of a namespace, as kind/name, but Events and the token of its service account."""
    kinds = kubectl.run("api-resources", "--namespaced", "--verbs=list", "-o", "name").stdout.split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    names = kubectl.run("get", ",".join(kinds), "-o", "name", "--ignore-not-found").stdout.split()
    return {name for name in names if not name.startswith(TOKEN)}
