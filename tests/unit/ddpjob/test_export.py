"""`ddpjob snapshots export` of a job on a cluster: what its pod holds comes into a folder, whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.answers import Server, status
from tests.unit.ddpjob.ended_job import PREFIX, Api

from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import FAILED, REFUSED, SUCCEEDED
from ddpjob_operator.cli.snapshots import export_from_cluster, noted_at_times
from ddpjob_operator.core.manifests.volume_pod import LONGEST_SECONDS
from ddpjob_operator.follow import volume_export
from ddpjob_operator.follow.volume_export import MOST_TRIES, parse_held
from ddpjob_operator.runtime.client import Client

FILES = {"model.pt": bytes(range(256)) * 400, "model.safetensors": b"\x00tensors"}
SUCCESS = b'\x03{"status": "Success"}'


class Pod(Api):
    """Holds files, which may be other bytes than it has summed, and cuts each connection after so many of them. Some
    servers then say that all is well.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.sent, self.cut, self.says_all_is_well = dict(FILES), 1 << 20, False
        self.sends_without_end = False
        self.busy, self.reads = 0, list[list[str]]()
        told = [{"name": n, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in FILES.items()]
        self.log = ["a warning", json.dumps({"step": 20, "files": told})]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/exec"):
            return await super().answer(request)
        assert request.path.removeprefix(f"{PREFIX}/pods/").removesuffix("/exec") in self.readers
        command = request.query.getall("command")
        self.reads.append(command)
        if self.busy:
            self.busy -= 1
            return status(503, "ServiceUnavailable")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        if self.sends_without_end:
            closed = asyncio.ensure_future(socket.receive())
            while not closed.done():
                await socket.send_bytes(b"\x01" + bytes(1 << 14))
                await asyncio.sleep(0)
            return socket
        content = self.sent[command[-1].rpartition("/")[2]][int(command[2]) - 1 :]
        for start in range(0, len(content[: self.cut]), 1 << 14):
            await socket.send_bytes(b"\x01" + content[: self.cut][start : start + (1 << 14)])
        if len(content) <= self.cut or self.says_all_is_well:
            await socket.send_bytes(SUCCESS)
        await socket.close()
        return socket


@pytest.fixture
def pod(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> Pod:
    monkeypatch.setattr(volume_export, "SECONDS_BETWEEN_LOOKS", 0.0)
    return Pod(server)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def export(to: Path, step: int | None = None) -> int:
    cluster = Cluster(namespace="default")
    return await asyncio.to_thread(export_from_cluster, cluster, "train", to, "model", step, None)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


async def test_both_files_come_and_the_pod_goes(pod: Pod, to: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await export(to, step=20) == SUCCEEDED
    assert written(to) == FILES
    assert capsys.readouterr().out == f"step 20: wrote {to}/model.pt and {to}/model.safetensors\n"
    (command,) = pod.commands
    assert command[:2] == ["export", "/mnt/shared/checkpoints/train"]
    assert command[2:] == ["--state", "model", "--to", "/tmp/export", "--hold", str(LONGEST_SECONDS), "--step", "20"]
    assert pod.readers == {}


@pytest.mark.parametrize("says_all_is_well", [False, True])
async def test_a_connection_that_ends_early_is_made_again_for_the_rest(
    pod: Pod, to: Path, *, says_all_is_well: bool
) -> None:
    pod.cut, pod.says_all_is_well = 60_000, says_all_is_well
    assert await export(to) == SUCCEEDED
    assert written(to) == FILES
    assert [command[2] for command in pod.reads] == ["+1", "+60001", "+1"]


async def test_a_server_that_is_busy_is_asked_again(pod: Pod, to: Path) -> None:
    pod.busy = MOST_TRIES - 1
    assert await export(to) == SUCCEEDED
    assert written(to) == FILES


async def test_bytes_that_changed_on_their_way_leave_what_was_there(
    pod: Pod, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(to / "model.pt", "of yesterday")
    pod.sent["model.safetensors"] = b"\x01tensors"
    assert await export(to) == REFUSED
    assert written(to) == {"model.pt": b"of yesterday"}
    assert "model.safetensors: what came is not what the pod has written" in capsys.readouterr().err
    assert pod.readers == {}


async def test_a_pod_that_sends_without_end_is_left_at_the_size_of_the_file(
    pod: Pod, to: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.sends_without_end = True
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await export(to) == REFUSED
    assert "model.pt: what came is not what the pod has written" in capsys.readouterr().err
    assert written(to) == {}
    assert pod.readers == {}


async def test_of_a_command_that_fails_the_last_lines_are_printed(
    pod: Pod, to: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(volume_export, "MOST_LINES", 2)
    pod.log, pod.code = ["one", "two", "three"], FAILED
    assert await export(to) == FAILED
    assert [line for line in capsys.readouterr().err.splitlines() if line in pod.log] == ["two", "three"]


@pytest.mark.parametrize("says_all_is_well", [False, True])
async def test_connections_that_bring_nothing_are_given_up(
    pod: Pod, to: Path, capsys: pytest.CaptureFixture[str], *, says_all_is_well: bool
) -> None:
    pod.cut, pod.says_all_is_well = 0, says_all_is_well
    assert await export(to) == REFUSED
    assert len(pod.reads) == MOST_TRIES
    assert "model.pt: the last 5 connections brought nothing, 0 of 102400 bytes are here" in capsys.readouterr().err
    assert written(to) == {}


@pytest.mark.parametrize(
    ("said", "code", "ended", "words"),
    [
        (["snapshot of step 9 has no state 'ema'; it has model"], 1, FAILED, "it has model"),
        (["no such folder"], 2, REFUSED, "no such folder"),
        ([], 137, REFUSED, "needs more memory than it may use; give the job more memory"),
        (["error: unrecognized arguments: --hold 21600"], 2, REFUSED, "older than this.*--image"),
        (['{"step": 20, "files": []}'], 0, FAILED, '"files": \\[\\]'),
    ],
)
async def test_what_cannot_be_exported_is_explained(
    pod: Pod, to: Path, capsys: pytest.CaptureFixture[str], said: list[str], code: int, ended: int, words: str
) -> None:
    pod.log, pod.code = said, code
    assert await export(to) == ended
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(words, printed.err)
    assert written(to) == {}
    assert pod.readers == {}


async def test_a_folder_that_cannot_be_written_is_named(pod: Pod, to: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(to, "a file")
    assert await export(to) == REFUSED
    assert f"{to}: File exists" in capsys.readouterr().err
    assert pod.readers == {}


def told(*names: str) -> str:
    files: Sequence[dict[str, Any]] = [{"name": name, "bytes": 1, "sha256": "0"} for name in names]
    return json.dumps({"step": 3, "files": files})


def test_a_pod_does_not_say_where_files_are_written() -> None:
    assert parse_held(told("../../.bashrc", "model.safetensors"), "model") is None
    assert parse_held('{"step": ' + "[" * 100_000, "model") is None
    assert parse_held(told("model.pt", "model.safetensors").replace(" 3,", " 1e999,"), "model") is None
    found = parse_held(told("/etc/passwd", "model.safetensors", "model.pt"), "model")
    assert found is not None
    assert (found[0], [held.name for held in found[1]]) == (3, ["model.pt", "model.safetensors"])


def test_progress_is_noted_now_and_then() -> None:
    notes, times = list[str](), iter([100.0, 101.0, 105.0, 105.1])
    moved = noted_at_times(notes.append, lambda: next(times))
    for name, here in (("model.pt", 0), ("model.pt", 1_000_000), ("model.pt", 2_000_000), ("model.safetensors", 0)):
        moved(name, here, 4_000_000)
    assert notes == ["model.pt: 4.0 MB", "model.pt: 2.0 MB of 4.0 MB", "model.safetensors: 4.0 MB"]
