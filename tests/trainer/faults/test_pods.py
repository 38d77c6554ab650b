"""What ends a pod, or one of two, as the launcher reports it to the operator."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.trainer.documented import message
from tests.trainer.faults.conftest import HERE
from tests.trainer.launch.conftest import ROOT, Pod, StartPod

from ddp_trainer.contract import processes

ENDLESS = ("--task", "faulty_tasks:Hasty", "--epochs", "100000", "--validate-every", "never")


def train(start_pod: StartPod, *arguments: str, **environment: str) -> Pod:
    path = f"{ROOT / 'trainer_image'}:{HERE}"
    argv = ["--module", "ddp_trainer.train", "--", *ENDLESS, *arguments]
    return start_pod("", argv=argv, PYTHONPATH=path, **environment)


def reported(pod: Pod, look: Callable[[dict[str, Any]], Any], what: str) -> Any:
    """The first true value of `look` at the pod's status."""
    return eventually(lambda: look(pod.status()), f"{what}; log:\n{pod.log}")


def events(pod: Pod, kind: str) -> list[dict[str, Any]]:
    """Whole lines of the log of events."""
    lines = (pod.shared / "logs/digits/events.jsonl").read_text().splitlines(keepends=True)
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["event"] == kind]


def test_auto_shows_what_it_has_chosen_and_from_what_and_a_dead_data_worker_is_named(start_pod: StartPod) -> None:
    pod = train(start_pod, "--workers", "1", DDPJOB_SNAPSHOT_EVERY="auto", DDPJOB_PROCS_PER_NODE="2")
    chosen = reported(pod, lambda status: status["snapshotInterval"], "an interval")
    assert (chosen["every"], chosen["failures"]) == ("auto", 0)
    assert chosen["stallSeconds"] > 0
    assert chosen["mttfSeconds"] == pytest.approx(24 * 3600, rel=0.01)
    young = math.sqrt(2 * chosen["mttfSeconds"] * chosen["stallSeconds"])
    floors = {"overhead": chosen["stallSeconds"] / 0.035, "save": chosen["saveSeconds"], "shortest": 10.0}
    assert chosen["seconds"] == pytest.approx(max(young, *floors.values()))
    saved = eventually(lambda: events(pod, "snapshot_saved"), "the log has the snapshot too")
    assert saved[0]["interval"] == chosen

    rank = pod.pids(2)[1]
    (worker,) = processes.children(rank)
    os.kill(worker, signal.SIGKILL)
    assert pod.wait() == 1
    words = message("A data worker dies").search(pod.message["message"])
    assert words, pod.log
    # torch has two ways to say how, depending on which of its checks sees the process gone first
    assert re.search(rf"rank 1 cannot load data: DataLoader worker \(pid {worker}\) (is killed|exited)", words[0])
    assert (pod.message["reason"], pod.message["rank"]) == ("WorkerException", 1)


@pytest.mark.fault(39)
def test_an_older_attempt_that_runs_on_leaves_every_file_to_the_newer(start_pod: StartPod) -> None:
    settings = {"DDPJOB_UID": "uid", "DDPJOB_SNAPSHOT_EVERY": "10steps"}
    older = train(start_pod, **settings, DDPJOB_ATTEMPT="0")
    reported(older, lambda status: status["snapshot"], "a snapshot")
    newer = train(start_pod, **settings, DDPJOB_ATTEMPT="1")
    assert older.wait() == 77
    assert (older.message["outcome"], older.message["reason"]) == ("Fenced", "Fenced")
    assert message("Two attempts at once").search(older.message["message"]), older.message["message"]
    resumed = reported(newer, lambda status: status["resumedFromStep"], "the newer attempt's resume")
    reported(newer, lambda status: status["snapshot"]["step"] > resumed, "a snapshot of the newer attempt")
