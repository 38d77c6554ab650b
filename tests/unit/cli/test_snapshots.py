"""`ddpjob snapshots` on a folder of this machine, and the pod that reads the volume of a job on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from ddpjob_operator.cli import volume_pod
from ddpjob_operator.cli.snapshots import run_here, what_begins_it
from ddpjob_operator.local.volume import lock_job, newest_snapshot
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_job


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """With the directory of one snapshot, which has no manifest."""
    (tmp_path / "checkpoints" / "digits" / "step-000000000010").mkdir(parents=True)
    return tmp_path


def test_the_trainers_command_lists_verifies_restores_and_removes(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(shared, "digits", "ls") == 0
    assert "10  BAD" in capsys.readouterr().out
    assert run_here(shared, "digits", "verify") == 1
    assert run_here(shared, "digits", "restore", ["--step", "10"]) == 1
    assert run_here(shared, "digits", "rm", ["--step", "10"]) == 0
    assert capsys.readouterr().out.endswith("step-000000000010: removed\n")
    assert run_here(shared, "digits", "ls") == 0
    assert "no snapshot in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("phase", "words"), [("Suspended", "ddpjob unsuspend digits"), ("Succeeded", "--resume"), ("Failed", "--resume")]
)
def test_after_a_restore_the_command_that_begins_from_it_is_named(phase: str, words: str) -> None:
    metadata = {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": "2030-01-01T12:00:00Z"}
    assert words in what_begins_it(parse_job({"metadata": metadata, "spec": {}, "status": {"phase": phase}}))


@pytest.mark.parametrize("command", ["rm", "restore"])
def test_nothing_is_changed_while_a_run_holds_the_job(
    shared: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_job(shared, "digits"):
        assert run_here(shared, "digits", command, ["--step", "10"]) == 2
    assert "job digits is already running" in capsys.readouterr().err
    assert (shared / "checkpoints" / "digits" / "step-000000000010").is_dir()


def test_a_run_shows_the_step_that_it_is_to_begin_from(shared: Path) -> None:
    assert newest_snapshot(shared, "digits") == 10
    (shared / "checkpoints" / "digits" / "restore.json").write_text('{"step": 5, "after": ""}')
    assert newest_snapshot(shared, "digits") == 5


@pytest.mark.parametrize("name", ["digitz", "../digits", "."])
def test_a_job_that_is_not_there_is_refused_with_those_that_are(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(shared, name, "ls") == 2
    assert capsys.readouterr().err == f"error: {shared} has no snapshots of {name}; it has those of digits\n"


MANIFEST = {"metadata": {"generateName": "digits-snapshots-"}}


class Pods:
    """Answers as the API server does: a pod that waits, runs and ends."""

    def __init__(self, *statuses: dict[str, Any], log: tuple[str, ...] = ()) -> None:
        self.statuses, self.log, self.deleted = list(statuses), log, 0

    async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": {"name": "digits-snapshots-x"}}

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return {"metadata": {"name": "digits-snapshots-x", "uid": "x"}, "status": status}

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """The connection breaks after every line that is new."""
        for number, line in enumerate(self.log):
            stamp = f"2030-01-01T12:00:0{number}Z"
            if stamp >= query.get("sinceTime", ""):
                yield f"{stamp} {line}"
            if stamp > query.get("sinceTime", ""):
                raise ApiError(0, "ConnectionFailed", "it broke")

    async def delete(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
        self.deleted += 1
        return {}


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "no such image"}}
    return {"phase": "Pending", "containerStatuses": [{"name": "snapshots", "state": state}]}


def ended(code: int) -> dict[str, Any]:
    return {
        "phase": "Failed",
        "containerStatuses": [{"name": "snapshots", "state": {"terminated": {"exitCode": code}}}],
    }


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_pod, "SECONDS_BETWEEN_LOOKS", 0.0)


async def test_the_pods_log_and_exit_code_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pods = Pods(
        waiting("ErrImagePull"), {"phase": "Running"}, ended(1), log=("step 20: ok", "step 10: BAD,  \x1b[2Jgone")
    )
    assert await volume_pod.run_pod(cast(Any, pods), "default", MANIFEST) == 1
    said = capsys.readouterr()
    assert said.out == "step 20: ok\nstep 10: BAD,  [2Jgone\n"
    assert "ErrImagePull" in said.err
    assert pods.deleted == 1


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ([waiting("ErrImagePull")], "has not started within 0 s: ErrImagePull"),
        ([{"phase": "Running"}, {"phase": "Failed", "reason": "DeadlineExceeded"}], "was stopped: DeadlineExceeded"),
    ],
)
async def test_a_pod_that_comes_to_nothing_is_explained_and_deleted(
    statuses: list[dict[str, Any]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_pod, "SECONDS_TO_START", 0.0)
    pods = Pods(*statuses)
    with pytest.raises(ApiError, match=words):
        await volume_pod.run_pod(cast(Any, pods), "default", MANIFEST)
    assert pods.deleted == 1


async def test_a_pod_whose_creation_is_not_answered_any_more_is_deleted() -> None:
    """Ctrl-C may come when the API server has made it and the answer is on its way."""

    class Interrupted(Pods):
        async def create(self, path: str, resource: str, body: dict[str, Any]) -> dict[str, Any]:
            raise asyncio.CancelledError

    pods = Interrupted({})
    with pytest.raises(asyncio.CancelledError):
        await volume_pod.run_pod(cast(Any, pods), "default", MANIFEST)
    assert pods.deleted == 1
