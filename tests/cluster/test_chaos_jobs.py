"""What `make chaos` compares in the end does differ where something is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.cluster.chaos_jobs import Hit, Job, differences
from tests.cluster.history import Change, History
from tests.cluster.kube import Kubectl
from tests.cluster.scenario import Scenario


def job(kubectl: Kubectl, *statuses: dict[str, Any]) -> Job:
    changes = [Change(0.0, "ddpjobs", "MODIFIED", {"metadata": {"name": "elastic"}, "status": one}) for one in statuses]
    return Job(Scenario(kubectl, History(kubectl, changes), "image", "elastic"))


def begun(attempt: int, reason: str, restarts: int, disruptions: int) -> dict[str, Any]:
    conditions = [{"type": "Restarting", "status": "True", "reason": reason}]
    return {"attempt": attempt, "restarts": restarts, "disruptions": disruptions, "conditions": conditions}


def test_an_attempt_of_another_size_is_no_disruption_that_a_fault_must_explain(tmp_path: Path) -> None:
    statuses = [begun(1, "NodeLost", 0, 1), begun(2, "ScaledDown", 0, 2), begun(2, "ScaledDown", 0, 2)]
    assert job(Kubectl(tmp_path), *statuses).counted == (0, 1)
    assert job(Kubectl(tmp_path), *statuses, begun(3, "ScaledUp", 0, 3)).counted == (0, 1)
    assert job(Kubectl(tmp_path), *statuses, begun(3, "WorkerKilled", 1, 2)).counted == (1, 1)


def pod(uid: str, phase: str, type_: str = "MODIFIED") -> Change:
    return Change(0.0, "pods", type_, {"metadata": {"name": "elastic-1-0", "uid": uid}, "status": {"phase": phase}})


def test_what_a_pod_costs_that_is_taken_away_is_known_once_it_is_gone(tmp_path: Path) -> None:
    struck = job(Kubectl(tmp_path), begun(1, "PodDeleted", 1, 0))
    struck.hits += [Hit(1, 0, "first"), Hit(0, 1, "second")]
    struck.scenario.history.changes += [pod("first", "Running"), pod("first", "Failed", "DELETED")]
    struck.scenario.history.changes += [pod("second", "Pending")]
    assert not struck.settled
    struck.scenario.history.changes += [pod("second", "Pending", "DELETED")]
    assert struck.settled
    assert struck.explained == (1, 0), "one that never began is created again, at no cost"
    struck.settle()
    assert (struck.explained, struck.recreated) == ((1, 0), {"second"})


def test_a_pod_that_began_costs_what_its_fault_does(tmp_path: Path) -> None:
    struck = job(Kubectl(tmp_path), begun(1, "PodDeleted", 1, 0))
    struck.hits += [Hit(1, 0), Hit(0, 1, "second")]
    struck.scenario.history.changes += [pod("second", "Pending"), pod("second", "Running", "DELETED")]
    assert struck.settled
    assert struck.explained == (1, 1)


def test_runs_that_did_not_take_the_same_steps_are_infinitely_far_apart() -> None:
    whole = [(1, 0, 2.5), (2, 0, 2.0), (3, 1, 1.5)]
    assert differences(whole, whole) == [0, 0, 0]
    assert differences([*whole[:2], (3, 1, 1.25)], whole) == [0, 0, 0.25]
    assert differences([whole[0], whole[2]], whole) == [math.inf]
    assert differences([*whole[:2], (3, 0, 1.5)], whole) == [math.inf]
