"""The status of a run on the shared folder: written when it changes, whole, and without stopping the run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Internal, Phase
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.trainer_report import LiveReport, RankReport, Throttling, TrainerReport, read_live
from ddpjob_operator.local.record import PodPlace, RanksFile, StatusFile, ranks_file, status_file
from ddpjob_operator.wire.jobs import parse_status

JOB = Job("digits", "local", "uid", 1, datetime(2030, 1, 1, tzinfo=UTC), DDPJobSpec(nodes=2), DDPJobStatus())
RUNNING = replace(JOB, status=DDPJobStatus(phase=Phase.RUNNING, attempt=1, internal=Internal(kept_pods={"secret": 1})))


def test_the_status_can_be_read_back(tmp_path: Path) -> None:
    StatusFile(tmp_path, JOB).write(RUNNING)
    found = json.loads(status_file(tmp_path, "digits").read_text())
    assert (found["version"], found["uid"], found["nodes"], found["procsPerNode"]) == (1, "uid", 2, 1)
    assert parse_status(found["status"]).phase is Phase.RUNNING
    assert "internal" not in found["status"]
    assert [path.name for path in status_file(tmp_path, "digits").parent.iterdir()] == ["status.json"]


def test_it_is_written_only_when_it_has_changed(tmp_path: Path) -> None:
    record, path = StatusFile(tmp_path, JOB), status_file(tmp_path, "digits")
    record.write(RUNNING)
    path.unlink()
    record.write(RUNNING)
    assert not path.exists()
    record.write(replace(RUNNING, status=DDPJobStatus(phase=Phase.SUCCEEDED)))
    assert json.loads(path.read_text())["status"]["phase"] == "Succeeded"


def test_it_has_the_newest_places_of_pods(tmp_path: Path) -> None:
    record, path = StatusFile(tmp_path, JOB), status_file(tmp_path, "digits")
    record.write(RUNNING)
    assert json.loads(path.read_text())["places"] == []
    record.write(RUNNING, [PodPlace("digits-0-0", attempt, 0) for attempt in range(1, 400)])
    places = json.loads(path.read_text())["places"]
    assert (len(places), places[-1]) == (256, {"pod": "digits-0-0", "attempt": 399, "nodeRank": 0})


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    record = StatusFile(tmp_path, JOB)
    record.write(RUNNING)
    (tmp_path / "logs").unlink()
    record.write(RUNNING)
    assert status_file(tmp_path, "digits").exists(), "it is tried again"


@pytest.mark.parametrize("left", ["", "{", "[]"])
def test_what_an_earlier_run_left_is_replaced(tmp_path: Path, left: str) -> None:
    path = status_file(tmp_path, "digits")
    path.parent.mkdir(parents=True)
    path.write_text(left)
    StatusFile(tmp_path, JOB).write(RUNNING)
    assert json.loads(path.read_text())["job"] == "digits"


def report(step: int, attempt: int = 0, age: float | None = 2.0) -> TrainerReport:
    ranks = (RankReport(1, step=step, phase="train", age_seconds=age, step_seconds=0.5, data_seconds=0.1),)
    throttling = Throttling(60.0, 600, 380, 45.2)
    live = LiveReport(3, 4, lost=step, dropped_steps=1, last_seconds=0.21)
    return TrainerReport(uid="uid", attempt=attempt, ranks=ranks, throttling=throttling, live=live)


def test_a_try_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = status_file(tmp_path, "digits")
    path.mkdir(parents=True)
    StatusFile(tmp_path, JOB).write(RUNNING)
    assert list(path.parent.iterdir()) == [path]


def test_what_ranks_report_is_written_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    times = iter([0.0, 0.5, 1.5, 1.5, 1.6, 1.7])
    record, path = RanksFile(tmp_path, JOB, lambda: next(times)), ranks_file(tmp_path, "digits")
    now = datetime(2030, 1, 1, 0, 0, 5, tzinfo=UTC)

    def written() -> tuple[int, int]:
        found = json.loads(path.read_text())
        return found["attempt"], found["ranks"][0]["step"]

    record.on_report("digits-0-0", report(1), now)
    rank = json.loads(path.read_text())["ranks"][0]
    assert json.loads(path.read_text())["throttling"] == {
        "digits-0-0": {"seconds": 60.0, "periods": 600, "throttledPeriods": 380, "throttledSeconds": 45.2}
    }
    assert rank == {
        "rank": 1, "pod": "digits-0-0", "phase": "train", "step": 1, "stepSeconds": 0.5, "dataSeconds": 0.1,
        "passesSeconds": None,
        "time": "2030-01-01T00:00:03.000+00:00",
    }  # fmt: skip
    live = json.loads(path.read_text())["live"]
    assert read_live(live, live["worldSize"]) == report(1).live
    record.on_report("digits-0-0", report(2), now)
    assert written() == (0, 1)
    record.on_report("digits-1-0", report(3, attempt=1), now)
    assert written() == (1, 3)
    record.on_report("digits-1-0", report(4, attempt=1), now)
    record.on_report("digits-0-0", report(9), now)
    record.write()
    assert written() == (1, 4)
