"""`ddpjob run` with restart.scope Live: a killed rank costs one step, and no snapshot is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked_run, local_run

from ddp_trainer.logs.losses import read_losses
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.local.volume import open_shared

pytestmark = pytest.mark.local

STEPS = 60
ARGS = ["--task", "live_tasks:Slow", "--global-batch", "24", "--max-steps", str(STEPS), "--lr", "0.003"]
TASKS = local_run.ROOT / "tests" / "trainer" / "live"


BUILT_IN: dict[str, Any] = {"args": ARGS}
SCRIPT = {"entrypoint": {"script": str(TASKS / "own_script.py")}, "args": ["--steps", str(STEPS)]}
"""With `attach_live`."""


def run(folder: Path, args: list[str], spec: dict[str, Any], *, chaos: str | None = None) -> DDPJobStatus:
    job = local_run.new_job("digits", {"snapshots": {"every": "1000steps"}} | spec | {"args": spec["args"] + args})
    environ = local_run.environment()
    environ["PYTHONPATH"] += f"{os.pathsep}{TASKS}"
    return forked_run.outcome(job, open_shared(folder), chaos=chaos, environ=environ).status


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_losses(folder / "logs" / "digits")}


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "logs" / "digits" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.parametrize(
    ("trains", "alone", "killed_after"),
    [
        (BUILT_IN, ["--task-options", "seconds=0"], ["--task-options", "killed_after=30"]),
        (SCRIPT, ["--seconds", "0", "--ranks", "1"], ["--killed-after", "30"]),
    ],
    ids=["built-in loop", "script"],
)
def test_a_killed_rank_costs_no_attempt_and_no_snapshot(
    tmp_path: Path, trains: dict[str, Any], alone: list[str], killed_after: list[str]
) -> None:
    run(tmp_path / "unbroken", alone, {**trains, "nodes": 1})
    killed = tmp_path / "killed"
    # its steps wait for the new rank
    spec = {"nodes": 3, "restart": {"scope": "Live"}, "stall": {"minSeconds": 300}}
    status = run(killed, killed_after, trains | spec, chaos="kill-rank@25%")
    assert (status.phase, status.attempt, status.restarts) == (Phase.SUCCEEDED, 0, 1)
    assert (status.live_recoveries, [event["worldSize"] for event in events(killed, "recovered")]) == (1, [2])
    assert status.last_failure is not None
    assert status.last_failure.reason == "WorkerKilled"
    assert [event["worldSize"] for event in events(killed, "regrouped")] == [2, 3]
    assert not events(killed, "resumed"), "a snapshot was read"
    unbroken, found = losses(tmp_path / "unbroken"), losses(killed)
    assert len(found) >= STEPS - 1, "more is missing than the loss that was under way"
    assert max(abs(loss - unbroken[step]) for step, loss in found.items()) < 1e-5


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    run(tmp_path / "unbroken", ["--task-options", "seconds=0"], BUILT_IN | {"nodes": 1})
    killed = tmp_path / "killed"
    spec = {"nodes": 2, "spares": 1, "restart": {"scope": "Live"}, "stall": {"minSeconds": 300}}
    options = ["--task-options", "ranks=2", "--task-options", "killed_after=30"]
    status = run(killed, options, BUILT_IN | spec, chaos="kill-rank@25%")
    assert (status.phase, status.attempt, status.restarts, status.live_recoveries) == (Phase.SUCCEEDED, 0, 1, 1)
    assert status.last_failure is not None
    assert status.internal.kept_pods == {"digits-0-s0": status.last_failure.node_rank}
    assert [event["worldSize"] for event in events(killed, "regrouped")] == [1, 2]
    assert not events(killed, "resumed"), "a snapshot was read"
    unbroken, found = losses(tmp_path / "unbroken"), losses(killed)
    assert len(found) >= STEPS - 1, "more is missing than the loss that was under way"
    assert max(abs(loss - unbroken[step]) for step, loss in found.items()) < 1e-5
