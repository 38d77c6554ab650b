"""On real nodes: what keeps a gang from starting is said in the words of whoever refuses it, and goes when it goes."""

from __future__ import annotations

import pytest
from tests.cluster.causes import CAUSES, apply, condition, prepare, quota_is_in_force, wait_condition, wait_degraded
from tests.cluster.scenario import Scenario
from tests.support.command import ddpjob
from tests.support.waiting import eventually


@pytest.mark.fault(26, 27, 33)
def test_a_job_that_cannot_start_says_why_and_starts_by_itself_once_it_can(scenario: Scenario) -> None:
    kubectl, history = scenario.kubectl, scenario.history
    prepare(kubectl)
    eventually(lambda: quota_is_in_force(kubectl), "the quota is in force")
    for cause in CAUSES:
        apply(kubectl, cause)
    for cause in CAUSES:
        said = wait_degraded(history, cause)
        assert cause.words in said["message"]
        assert cause.advice in said["message"]
        answer = ddpjob(kubectl.kubeconfig, "why", cause.name, "--namespace", kubectl.namespace).stdout
        headline = answer.partition("\n")[0]
        assert headline.startswith(f"{cause.name}: Starting for"), answer
        assert cause.words in headline
        assert cause.advice in answer
        job = history.latest("ddpjobs", cause.name)
        assert job is not None
        assert job["status"]["phase"] == "Starting"
        placed = "True" if cause.name in ("image", "secret", "mount") else "False"
        # of a gang whose first pod is refused by its node, the second may still wait for one
        wait_condition(history, cause, "Scheduled", placed)
        assert job["status"]["restarts"] == 0

    late = next(cause for cause in CAUSES if cause.name == "node")
    kubectl.run("patch", "ddpjob", late.name, "--type=merge", "--patch", '{"spec": {"startupDeadlineSeconds": 1}}')
    failed = history.wait(
        lambda: condition(history.latest("ddpjobs", late.name), "Failed"), "the job fails at its startup deadline"
    )
    assert failed["reason"] == "StartupDeadlineExceeded"
    assert late.words in failed["message"]

    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nowhere"}, "stringData": {"token": "x"}}
    kubectl.apply(token)

    def done() -> bool:
        job = history.latest("ddpjobs", "secret") or {}
        return bool(job.get("status", {}).get("phase") == "Succeeded")

    history.wait(done, "the job whose secret was missing has trained")
    after = history.latest("ddpjobs", "secret")
    degraded = condition(after, "Degraded")
    assert degraded is not None
    assert degraded["status"] == "False"
    assert after is not None
    assert (after["status"]["attempt"], after["status"]["restarts"]) == (0, 0)
