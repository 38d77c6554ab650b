"""`job.snapshots()` and `ddpjob snapshots ls -o json`: what the volume has, as the trainer's own command lists it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.ddpjob.ended_job import Api

from ddp_trainer.snapshots.__main__ import main as trainers_command
from ddpjob import AsyncJob, Job, Snapshot
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import REFUSED, SUCCEEDED, Output
from ddpjob_operator.cli.snapshots import show_here, show_on_volume, show_record
from ddpjob_operator.follow import volume_snapshots
from ddpjob_operator.runtime.errors import ApiError

NEWEST = {"series": "step", "step": 20, "time": "2030-01-01T12:00:00Z", "kind": "final", "bytes": 5, "setAside": False}
LISTED = [NEWEST, {"series": "step", "step": 10, "problem": "bad"}, {"series": "step", "step": 30, "setAside": True}]
FOUND = (
    Snapshot(20, time=datetime(2030, 1, 1, 12, tzinfo=UTC), kind="final", bytes=5),
    Snapshot(10, problem="bad"),
    Snapshot(30, set_aside=True),
)


@pytest.fixture
def listed(api: Api) -> Api:
    api.log = ["a warning of a library", *map(json.dumps, LISTED)]
    return api


async def test_all_that_the_volume_has_is_read_in_a_pod_that_is_deleted(listed: Api) -> None:
    async with await AsyncJob.get("train", namespace="default") as job:
        assert await job.snapshots() == FOUND
    assert listed.commands == [["ls", "/mnt/shared/checkpoints/train", "--json"]]
    assert listed.readers == {}


@pytest.mark.parametrize(
    "line",
    [
        '{"level": "warning", "msg": "x"}',
        "{not JSON",
        '{"step": "20"}',
        '{"step": true}',
        '{"step": 20, "time": 5}',
        '{"step": 20, "time": "at noon"}',
        '{"step": ' + "[" * 100_000,
    ],
    ids=["a logger's", "no JSON", "a text", "true", "a number for a time", "no time", "deep"],
)
async def test_a_line_that_is_no_snapshot_is_left_out(listed: Api, line: str) -> None:
    listed.log = [line, *listed.log]
    async with await AsyncJob.get("train", namespace="default") as job:
        assert await job.snapshots() == FOUND


async def test_without_asyncio_it_is_the_same(listed: Api) -> None:
    def snapshots() -> tuple[Snapshot, ...]:
        with Job.get("train", namespace="default") as job:
            return job.snapshots(image="mine:2")

    assert await asyncio.to_thread(snapshots) == FOUND


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ("__main__.py: error: unrecognized arguments: --json", "older than this.*name a newer one with --image"),
        ("permission denied", "permission denied"),
    ],
)
async def test_what_cannot_be_listed_is_an_error_with_the_cause(api: Api, said: str, refusal: str) -> None:
    api.log, api.code = [said], 2
    async with await AsyncJob.get("train", namespace="default") as job:
        with pytest.raises(ApiError, match=refusal):
            await job.snapshots()


async def test_a_job_that_has_not_saved_anything_has_none(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of the trainer itself."""
    assert trainers_command(["ls", str(tmp_path / "train"), "--json"]) == 2
    api.log, api.code = capsys.readouterr().out.splitlines(), 2
    async with await AsyncJob.get("train", namespace="default") as job:
        assert await job.snapshots() == ()


@pytest.mark.parametrize("output", Output)
async def test_a_command_for_a_job_that_has_not_saved_anything_lists_none(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: Output
) -> None:
    trainers_command(["ls", str(tmp_path / "train")])
    api.log, api.code = capsys.readouterr().out.splitlines(), 2
    assert await asyncio.to_thread(show_on_volume, Cluster(namespace="default"), "train", None, output) == SUCCEEDED
    said = capsys.readouterr().out
    if output is Output.TEXT:
        assert said == "no snapshot of train is on its volume\n"
    else:
        assert LOADS[output](said) == {"snapshots": []}


@pytest.mark.parametrize("code", [0, 1])
async def test_the_command_prints_what_the_trainer_lists(
    api: Api, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    api.log, api.code = ["step 20  final", "step 10  BAD"], code
    assert await asyncio.to_thread(show_on_volume, Cluster(namespace="default"), "train", None, Output.TEXT) == code
    assert capsys.readouterr().out.splitlines() == api.log
    assert api.commands == [["ls", "/mnt/shared/checkpoints/train"]]


@pytest.mark.parametrize("output", Output)
async def test_a_pod_that_prints_without_end_is_left(
    listed: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: Output
) -> None:
    monkeypatch.setattr(volume_snapshots, "MOST_LISTED", 100)
    assert await asyncio.to_thread(show_on_volume, Cluster(namespace="default"), "train", None, output) == REFUSED
    assert "printed more than 100 characters; name a trainer image with --image" in capsys.readouterr().err
    assert listed.readers == {}


LOADS = {Output.JSON: json.loads, Output.YAML: yaml.safe_load}


@pytest.mark.parametrize("output", LOADS)
async def test_the_command_prints_them_as_objects(
    listed: Api, capsys: pytest.CaptureFixture[str], output: Output
) -> None:
    cluster = Cluster(namespace="default")
    assert await asyncio.to_thread(show_on_volume, cluster, "train", None, output) == SUCCEEDED
    steps = [(found["step"], found["setAside"]) for found in LOADS[output](capsys.readouterr().out)["snapshots"]]
    assert steps == [(20, False), (10, False), (30, True)]


@pytest.mark.parametrize("output", LOADS)
@pytest.mark.parametrize("snapshot", [None, {"step": 20, "time": "2030-01-01T12:00:00Z", "verified": True}])
async def test_the_one_on_record_is_printed_as_the_status_has_it(
    api: Api, capsys: pytest.CaptureFixture[str], output: Output, snapshot: dict[str, Any] | None
) -> None:
    assert api.job is not None
    api.job["status"] |= {"snapshot": snapshot}
    assert await asyncio.to_thread(show_record, Cluster(namespace="default"), "train", output) == SUCCEEDED
    expected = [] if snapshot is None else [snapshot]
    assert LOADS[output](capsys.readouterr().out) == {"snapshots": expected}
    assert api.commands == []


@pytest.mark.processes
def test_those_of_a_folder_are_printed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "train" / "step-000000000010").mkdir(parents=True)
    assert show_here(tmp_path, "train", Output.JSON) == SUCCEEDED
    (found,) = json.loads(capsys.readouterr().out)["snapshots"]
    assert (found["step"], found["problem"]) == (10, "manifest.json is missing")
    assert show_here(tmp_path, "other", Output.JSON) == REFUSED
    assert capsys.readouterr().out == ""
