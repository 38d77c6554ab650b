"""Commands that follow a job, whose reader goes away: `ddpjob logs -f train | grep -m1 loss`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.answers import Server, ok

from ddpjob_operator.cli import reader
from ddpjob_operator.cli.events import show_events
from ddpjob_operator.cli.folder import show_folder_logs
from ddpjob_operator.cli.logs import show_logs
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.output import is_unread, lasting
from ddpjob_operator.cli.parameters import Output
from ddpjob_operator.cli.reader import while_read
from ddpjob_operator.cli.watch import show_watch
from ddpjob_operator.follow.job_lines import Volume
from ddpjob_operator.follow.lines import Wanted
from ddpjob_operator.page import files
from ddpjob_operator.runtime.client import Client

HERE = Cluster(namespace="default")


@contextmanager
def piped() -> Iterator[int]:
    """Standard output is a pipe; its end to read, which the block closes."""
    end, write = os.pipe()
    with os.fdopen(write, "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", lasting(file))  # here: pytest sets its own between a fixture and its test
        patch.setattr(reader, "SECONDS_BETWEEN_LOOKS", 0.01)
        yield end


@contextmanager
def unread() -> Iterator[None]:
    """Standard output is a pipe whose reader is gone."""
    with piped() as end:
        os.close(end)
        yield


async def test_what_is_shown_ends_once_nobody_reads_it() -> None:
    ended = list[bool]()

    async def show() -> int:
        try:
            while True:
                print("loss 0.5")
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    with unread():
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await while_read(show)() == 0
    assert ended == [True]


async def test_what_is_read_to_its_end_keeps_its_exit_code_and_its_error() -> None:
    async def show(*codes: int) -> int:
        print("loss 0.5")
        (code,) = codes
        return code

    with piped() as end:
        assert await while_read(show)(1) == 1
        with pytest.raises(ValueError, match="not enough values"):
            await while_read(show)()
        os.close(end)


async def test_ctrl_c_waits_for_what_is_left_to_clean_up() -> None:
    done = list[str]()

    async def show() -> int:
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")
        return 0

    showing = asyncio.create_task(while_read(show)())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    showing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await showing
    assert done == ["cleaned up"]


@pytest.mark.parametrize(
    "show",
    [
        lambda: show_logs(HERE, "train", Wanted(), True, Volume()),
        lambda: show_events(HERE, "train", True, Output.TEXT),
        lambda: show_watch(HERE, "train"),
    ],
    ids=["logs -f", "events -f", "watch"],
)
async def test_a_job_on_a_cluster_is_not_followed_without_a_reader(
    server: Server, client: Client, show: Callable[[], int]
) -> None:
    """The job of the test fails in the end, so that a command which follows it to there has exit code 1."""
    began = time.monotonic()
    owner = {"uid": "job", "controller": True}
    labels = {"training.ddpjob.io/attempt": "0", "training.ddpjob.io/node-rank": "0"}
    pod = {"metadata": {"name": "train-0-0", "uid": "pod", "labels": labels, "ownerReferences": [owner]}}
    happened = {
        "metadata": {"name": "train.1", "uid": "event"},
        "involvedObject": {"kind": "DDPJob", "name": "train", "uid": "job"},
        "lastTimestamp": "2030-01-01T00:00:00Z",
        "reason": "Starting",
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        goes_on = time.monotonic() < began + PATIENCE_SECONDS
        if request.path.endswith("/log"):
            return web.Response(text="2030-01-01T00:00:00Z step 5\n")
        if "/ddpjobs/" in request.path:
            status = {"phase": "Running" if goes_on else "Failed", "progress": {"step": 5, "totalSteps": 10}}
            return ok({"metadata": {"name": "train", "uid": "job"}, "spec": {"nodes": 1}, "status": status})
        items = [pod | {"status": {"phase": "Running"}}] if request.path.endswith("/pods") else [happened]
        return ok({"metadata": {"resourceVersion": "1"}, "items": items})

    server.answers = [answer]
    with unread():
        assert await asyncio.to_thread(show) == 0
        assert is_unread()


def test_a_folder_is_not_followed_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    pods = tmp_path / "logs" / "train" / "pods"
    pods.mkdir(parents=True)
    about: dict[str, Any] = {"version": 1, "job": "train", "uid": "u", "nodes": 1, "status": {"phase": "Failed"}}
    (pods.parent / "status.json").write_text(json.dumps(about))
    (pods / "train-0-0.log").write_text("---- 2026-01-02T03:04:05Z train-0-0 (p) starts\nstep 5\n")
    monkeypatch.setattr(files, "is_running", lambda *_: time.monotonic() < began + PATIENCE_SECONDS)
    with unread():
        assert show_folder_logs(tmp_path, "train", Wanted(), follow=True) == 0
