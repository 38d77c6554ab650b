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
from ddpjob_operator.local.record import StatusFile, status_file
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
