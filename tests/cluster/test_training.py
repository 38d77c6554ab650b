"""A job that nobody disturbs: it trains on both nodes, tells how far it is, and asks the API server for little."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import pairwise
from typing import Any

from tests.cluster.audit import audit_log, requests
from tests.cluster.conftest import Operator, Unbroken
from tests.cluster.history import nodes_with_two_pods, untrue_steps
from tests.cluster.scenario import NODES, STEPS
from tests.support.command import ddpjob
from tests.support.tiers import cannot_run

PROGRESS = {
    *("progress", "nodes", "snapshot", "goodput", "summary"),
    *("internal.reportedSeconds", "internal.nodeSeconds", "internal.gpuSeconds"),
}
"""Parts of the status that follow training; a write of these alone is made at most every so many seconds."""

WIDE = ["LOSS", "ACCURACY", "GOODPUT"]


def test_a_job_of_two_nodes_learns_to_read_digits(unbroken: Unbroken) -> None:
    status = unbroken.job["status"]
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 0, 0)
    assert status["progress"]["metrics"]["eval_accuracy"] >= 0.95
    assert (status["progress"]["step"], status["progress"]["totalSteps"]) == (STEPS, STEPS)
    assert (status["snapshot"]["step"], status["snapshot"]["verified"]) == (STEPS, True)
    assert [line["step"] for line in unbroken.records.losses] == list(range(1, STEPS + 1))


def test_its_pods_run_on_both_nodes(unbroken: Unbroken) -> None:
    assert len({pod["spec"]["nodeName"] for pod in unbroken.pods}) == NODES


def test_its_history_holds_one_pod_a_node_and_no_step_back(unbroken: Unbroken) -> None:
    phases = [status["phase"] for status in unbroken.scenario.statuses if "phase" in status]
    assert list(dict.fromkeys(phases)) == ["Starting", "Running", "Succeeded"]
    assert untrue_steps(unbroken.scenario.statuses) == []
    assert nodes_with_two_pods(unbroken.scenario.history.changes) == []


def test_kubectl_get_shows_how_far_it_is(unbroken: Unbroken) -> None:
    header, row = unbroken.scenario.kubectl.run("get", "ddpjobs", "-o", "wide").stdout.splitlines()
    *columns, failure, failed_on = header.replace("ETA", "").split()  # a finished job has no ETA, and this no failure
    assert (failure, failed_on) == ("FAILURE", "FAILED-ON")
    shown = dict(zip(columns, row.split(), strict=True))
    assert list(shown) == ["NAME", "PHASE", "NODES", "PROGRESS", "ATTEMPT", "RESTARTS", "REASON", "AGE", *WIDE]
    assert (shown["NAME"], shown["PHASE"], shown["ATTEMPT"]) == ("digits", "Succeeded", "0")
    assert (shown["NODES"], shown["PROGRESS"]) == (f"{NODES}/{NODES}", f"{STEPS}/{STEPS}")
    assert float(shown["LOSS"]) < 1


def test_ddpjob_shows_what_its_ranks_printed_and_why_it_is_where_it_is(unbroken: Unbroken) -> None:
    kubectl = unbroken.scenario.kubectl
    of_job = ("digits", "--namespace", kubectl.namespace)
    lines = ddpjob(kubectl.kubeconfig, "logs", *of_job).stdout.splitlines()
    assert f"[rank 0] finished after {STEPS} steps" in "\n".join(lines)
    assert {line.partition("]")[0] for line in lines} == {f"[rank {rank}" for rank in range(NODES)}
    last = ddpjob(kubectl.kubeconfig, "logs", *of_job, "--rank", "1", "--tail", "1").stdout
    assert [line.partition("]")[0] for line in last.splitlines()] == ["[rank 1"]
    said = ddpjob(kubectl.kubeconfig, "why", *of_job).stdout
    assert said.startswith("digits: Succeeded ")
    assert f"step {STEPS}/{STEPS} (100%)" in said
    happened = ddpjob(kubectl.kubeconfig, "events", *of_job).stdout
    assert "job: Starting: " in happened
    assert "attempt 0, pod digits-0-1: Scheduled: " in happened
    pods = kubectl.list("pods")
    verified = ddpjob(kubectl.kubeconfig, "snapshots", "verify", *of_job).stdout
    assert f"step {STEPS}: ok, " in verified
    assert {pod["metadata"]["name"] for pod in kubectl.list("pods")} <= {pod["metadata"]["name"] for pod in pods}


def test_kubectl_explain_says_what_a_field_means(operator: Operator) -> None:
    said = operator.kubectl.run("explain", "ddpjob.spec.snapshots").stdout
    assert "When the training state is saved" in said
    assert "`100steps`" in said


def test_it_costs_its_pods_their_release_a_service_a_claim_and_three_writes(
    unbroken: Unbroken, operator: Operator
) -> None:
    files = audit_log(operator.kubectl.kubeconfig)
    if not files:
        cannot_run("cluster", "the audit log of this cluster's API server cannot be read from here")
    # names of objects in other namespaces are other tests' business; a watch over all of them has no namespace
    asked = Counter(
        str(request.permission)
        for request in requests(files, operator.user, unbroken.began)
        if request.namespace == unbroken.scenario.kubectl.namespace
        and request.time <= unbroken.ended + timedelta(seconds=1)
    )
    written = asked.pop("patch ddpjobs/status.training.ddpjob.io")
    events = asked.pop("create events", 0) + asked.pop("patch events", 0)
    asked.pop("list events", None)  # where the containers took more than three seconds to start
    assert asked == {
        "create pods": NODES,
        "patch pods": NODES,
        "create services": 1,
        "create persistentvolumeclaims": 1,
        "create networkpolicies.networking.k8s.io": 1,
    }
    assert written == len(unbroken.scenario.statuses) - 1, "a write that changed nothing"
    of_state = [pair for pair in pairwise(unbroken.scenario.statuses) if not _changed(*pair) <= PROGRESS]
    slow = [pair for pair in of_state if _is_slow_start(*pair)]
    assert len(of_state) - len(slow) <= 3, [_changed(*pair) for pair in of_state]
    assert events <= 3 + len(slow)


def _is_slow_start(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a write only says why the gang does not start: what lasts for more than three seconds is worth one, and
    an event. On a busy machine a claim may take so long to be bound, or a pod to be placed.
    """
    one, other = ({item["type"]: item for item in status.get("conditions", ())} for status in (before, after))
    said = {type_ for type_ in one.keys() | other.keys() if one.get(type_) != other.get(type_)}
    starts = before.get("phase") == after.get("phase") == "Starting"
    return starts and said <= {"Degraded", "Scheduled"} and _changed(before, after) <= {*PROGRESS, "conditions"}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Parts of the status that differ."""
    one, other = _parts(before), _parts(after)
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _parts(status: dict[str, Any]) -> dict[str, Any]:
    own = {f"internal.{name}": value for name, value in status.get("internal", {}).items()}
    return own | {name: value for name, value in status.items() if name != "internal"}
