"""A loop that saves with its own writer: what is left where it is killed, stopped or started with other ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.starting import starts_processes
from tests.trainer.train.volume import Volume

HERE = Path(__file__).parent
SCRIPT = "saves_itself.py"


@pytest.fixture(scope="module")
@starts_processes
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    job = Volume(tmp_path_factory.mktemp("unbroken"), here=HERE).trained(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="4steps")
    assert job.checkpoint_steps() == [4, 8, 12]
    return job.script_losses()


def resumed(job: Volume) -> list[int]:
    return [event["step"] for event in job.events("resumed")]


def test_a_rank_that_is_killed_while_it_writes_leaves_no_half_checkpoint(job: Volume, unbroken: Any) -> None:
    killed = job.train(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="4steps", DIES_IN_BLOCK="8")
    assert killed.returncode != 0
    assert job.checkpoint_steps() == [4]
    job.trained(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="4steps", DDPJOB_ATTEMPT="1")
    assert resumed(job) == [4]
    assert job.script_losses() == unbroken
    assert not list(job.checkpoints.glob(".tmp-*"))


def test_a_stop_request_saves_on_all_ranks_and_exits_143(job: Volume, unbroken: Any) -> None:
    stopped = job.train(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="100steps", STOPS_AT="5")
    assert re.search(r"exitcode *: 143", stopped.stderr), stopped.stderr
    assert job.checkpoint_steps() == [6]
    manifest = json.loads((job.checkpoints / "checkpoint-000000000006" / "manifest.json").read_text())
    assert (manifest["kind"], sorted(manifest["files"])) == ("preempted", ["rank-1", "states.pt"])
    job.trained(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="100steps", DDPJOB_ATTEMPT="1")
    assert resumed(job) == [6]
    assert job.script_losses() == unbroken


def test_a_damaged_checkpoint_is_passed_over_by_another_number_of_ranks_too(job: Volume, unbroken: Any) -> None:
    job.trained(2, SCRIPT, DDPJOB_SNAPSHOT_EVERY="4steps")
    with (job.checkpoints / "checkpoint-000000000012" / "rank-1").open("r+b") as file:
        file.write(b"X")
    job.trained(1, SCRIPT, DDPJOB_SNAPSHOT_EVERY="4steps", DDPJOB_ATTEMPT="1")
    assert resumed(job) == [8]
    assert [event["worldSize"] for event in job.events("batch_changed")] == [[2, 1]]
    losses = {step: loss for step, (loss,) in job.script_losses().items()}
    assert losses == pytest.approx({step: loss for step, (loss,) in unbroken.items()})
    assert [event["step"] for event in job.events("snapshot_set_aside")] == [12]
