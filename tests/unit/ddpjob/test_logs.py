"""`job.logs()` and `ddpjob logs` of a job whose pods are gone: both read its volume, with the same code."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import eventually
from tests.unit.answers import Server, ok
from tests.unit.ddpjob.ended_job import READ, Api

from ddpjob import AsyncJob, Job
from ddpjob.sync import run
from ddpjob_operator.cli.logs import show_logs
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import FAILED, REFUSED, SUCCEEDED
from ddpjob_operator.follow.job_lines import Volume
from ddpjob_operator.follow.lines import Wanted
from ddpjob_operator.runtime.errors import ApiError


async def get() -> AsyncJob:
    return await AsyncJob.get("train", namespace="default")


@pytest.mark.parametrize("follow", [True, False])
async def test_a_job_that_has_ended_is_read_from_its_volume_when_its_pods_are_gone(api: Api, follow: bool) -> None:
    async with await get() as job:
        lines = [(line.node, str(line)) async for line in job.logs(follow=follow)]
        assert lines == [(0, READ[0]), (1, READ[1])]
        assert (api.gone.is_set(), api.readers) == (True, {})


def lines_of(**wanted: Any) -> list[str]:
    with Job.get("train", namespace="default") as job:
        return [str(line) for line in job.logs(**wanted)]


@pytest.mark.parametrize("follow", [True, False])
async def test_an_attempt_that_is_over_is_read_from_the_volume_while_the_job_runs(api: Api, follow: bool) -> None:
    """Its pods are gone, and no line of it comes any more."""
    assert api.job is not None
    api.job["status"] = {"phase": "Running", "attempt": 2}
    async with await get() as job:
        assert [str(line) async for line in job.logs(attempt=1, follow=follow)] == READ
    assert api.commands == [["/mnt/shared", "train", "--attempt=1"]]


async def test_without_asyncio_it_is_the_same(api: Api) -> None:
    assert await asyncio.to_thread(lines_of, rank=1, grep="step") == READ
    assert (api.gone.is_set(), api.readers) == (True, {})


async def test_lines_are_chosen_in_the_pod_which_has_the_image_that_is_named(api: Api) -> None:
    async with await get() as job:
        lines = job.logs(rank=1, grep="lo.s", image="mine:2")
        await anext(lines)
        ((container,),) = (reader["spec"]["containers"] for reader in api.readers.values())
        assert container["image"] == "mine:2"
        assert container["args"][2:] == ["--attempt=0", "--rank=1", "--grep=lo.s"]
        await lines.aclose()
        assert api.readers == {}, "whoever stops early has the pod deleted"


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        ({"node": 1, "attempt": 2}, ["--attempt=2", "--node=1"]),
        ({"tail": 5, "rank": 0}, ["--attempt=0", "--rank=0", "--tail=5"]),
        ({"since": timedelta(minutes=1.5)}, ["--attempt=0", "--since=90"]),
        ({"since": timedelta(milliseconds=1)}, ["--attempt=0", "--since=1"]),
    ],
)
async def test_lines_are_chosen_as_the_command_does(api: Api, wanted: dict[str, Any], options: list[str]) -> None:
    assert await asyncio.to_thread(lines_of, **wanted) == READ
    assert api.commands == [["/mnt/shared", "train", *options]]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"rank": 1, "node": 0}, "rank, node: a rank is on one node; give one of them"),
        ({"tail": -1}, "tail: -1 is too small; give 0 or more"),
        ({"since": timedelta()}, "since: 0 s is too small; give 1 s or more"),
    ],
)
async def test_a_choice_that_cannot_be_is_refused(api: Api, wanted: dict[str, Any], said: str) -> None:
    async with await get() as job:
        with pytest.raises(ValueError, match=said):
            await anext(job.logs(**wanted))


async def test_a_job_that_is_gone_is_read_from_the_claim_that_was_made_for_it_or_that_is_named(api: Api) -> None:
    async with await get() as job:
        api.job = None
        assert [str(line) async for line in job.logs()] == READ
        with pytest.raises(ApiError, match="nor the claim mine says which image"):
            await anext(job.logs(claim="mine"))
        assert [str(line) async for line in job.logs(claim="mine", image="mine:2")] == READ


async def test_without_a_claim_it_is_the_job_that_is_unknown(api: Api) -> None:
    async with await get() as job:
        api.job, api.claims = None, {}
        with pytest.raises(ApiError, match="there is no DDPJob train in namespace default"):
            await anext(job.logs())


async def test_a_volume_without_logs_of_the_job_is_an_error(api: Api) -> None:
    api.log, api.code = ["error: the volume has no logs of pods of train; it has none of any job"], 2
    async with await get() as job:
        with pytest.raises(ApiError, match="the volume has no logs of pods of train"):
            await anext(job.logs())
        assert api.readers == {}


FAILURE = {"attempt": 0, "time": "2030-01-01T00:00:00Z", "reason": "WorkerException", "message": "", "logTail": "tail"}


@pytest.mark.parametrize(
    ("status", "code", "follow", "exit_code", "printed"),
    [
        ({"phase": "Succeeded"}, 0, False, SUCCEEDED, READ),
        ({"phase": "Succeeded"}, 0, True, SUCCEEDED, READ),
        ({"phase": "Failed"}, 0, False, SUCCEEDED, READ),
        ({"phase": "Failed"}, 0, True, FAILED, READ),
        ({"phase": "Suspended"}, 0, False, SUCCEEDED, READ),
        (None, 0, True, SUCCEEDED, READ),
        ({"phase": "Failed", "lastFailure": FAILURE}, 2, False, REFUSED, ["tail"]),
        ({"phase": "Failed", "lastFailure": FAILURE | {"logTail": "\x1b[2Ja\nb"}}, 2, False, REFUSED, ["[2Ja", "b"]),
        ({"phase": "Running"}, 0, False, SUCCEEDED, []),
    ],
)
async def test_the_command_prints_the_same_lines_and_its_exit_code_is_of_the_job_that_it_follows(
    api: Api,
    capsys: pytest.CaptureFixture[str],
    status: dict[str, Any] | None,
    code: int,
    follow: bool,
    exit_code: int,
    printed: list[str],
) -> None:
    api.job = None if status is None or api.job is None else api.job | {"status": status}
    api.code = code
    if code:
        api.log = ["error: the volume has no logs of pods of train"]
    cluster = Cluster(namespace="default")
    assert await asyncio.to_thread(show_logs, cluster, "train", Wanted(), follow, Volume()) == exit_code
    said = capsys.readouterr()
    assert said.out.splitlines() == printed
    assert ("a short-lived pod reads the logs" in said.err) is bool(printed)
    if code:
        assert said.err.endswith("error: the volume has no logs of pods of train\n")


@pytest.mark.parametrize(
    ("phase", "attempt", "exit_code"),
    [("Running", 2, SUCCEEDED), ("Restarting", 2, SUCCEEDED), ("Failed", 2, FAILED), ("Failed", 1, FAILED)],
)
async def test_an_attempt_that_was_followed_to_its_end_is_no_failure_of_a_job_that_goes_on(
    api: Api, phase: str, attempt: int, exit_code: int
) -> None:
    assert api.job is not None
    api.job["status"] = {"phase": phase, "attempt": attempt}
    cluster = Cluster(namespace="default")
    assert await asyncio.to_thread(show_logs, cluster, "train", Wanted(attempt=1), True, Volume()) == exit_code


@pytest.mark.parametrize("reads", [2, 3])
async def test_the_exit_code_is_not_that_of_a_job_which_replaces_the_one_that_was_followed(
    api: Api, server: Server, reads: int
) -> None:
    """After two reads before there is a line, after three at the end: how the job ended is not known then."""
    assert api.job is not None
    asked, replaced = list[str](), api.job | {"metadata": api.job["metadata"] | {"uid": "the next one"}}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/ddpjobs/" not in request.path:
            return await api.answer(request)
        asked.append(request.path)
        return ok(api.job if len(asked) < reads else replaced | {"status": {"phase": "Failed"}})

    server.answers = [answer]
    code = await asyncio.to_thread(show_logs, Cluster(namespace="default"), "train", Wanted(), True, Volume())
    assert code == (REFUSED if reads == 2 else SUCCEEDED)


async def test_a_refusal_in_words_of_a_job_has_no_escape_sequences(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of variables in a podTemplate are what its author likes."""
    assert api.job is not None
    env = [{"name": "DDPJOB_\x1b[2J", "value": "1"}]
    api.job["spec"] = {"podTemplate": {"spec": {"containers": [{"name": "trainer", "env": env}]}}}
    cluster = Cluster(namespace="default")
    assert await asyncio.to_thread(show_logs, cluster, "train", Wanted(), False, Volume()) == REFUSED
    assert capsys.readouterr().err.endswith("env: DDPJOB_[2J is reserved for the operator; remove it\n")


def test_ctrl_c_waits_for_what_is_left_to_clean_up() -> None:
    began, cleaned = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)  # such as the deletion of the pod
            cleaned.set()

    main = threading.main_thread().ident or 0

    def waits() -> FrameType | None:
        frame = sys._current_frames()[main]
        return frame if frame.f_code.co_name == "wait" else None

    def interrupt() -> None:
        began.wait()
        frame = eventually(waits, "the caller waits for the result")
        while sys._current_frames()[main] is frame:  # Python misses a signal that comes right before the lock is taken
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(1)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert cleaned.is_set()
