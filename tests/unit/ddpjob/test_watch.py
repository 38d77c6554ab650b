"""`job.watch()`: in a notebook, and where there is none; and `job.wait()`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from IPython.lib.pretty import pretty
from tests.unit.answers import Server, ok
from tests.unit.follow.test_read import POD, RANKS

from ddpjob import AsyncJob, Job
from ddpjob.notebook import NotebookDisplay, display_here, html_of
from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase, Progress
from ddpjob_operator.core.ledger.ranks import RankRow, Reports
from ddpjob_operator.local.display import PlainDisplay
from ddpjob_operator.local.observed import NodeView, RunView
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
EVIL = "<script>alert(1)</script>"


@dataclass
class Outputs:
    """What IPython's protocol for displays was asked for: one output, and what has replaced it."""

    contents: list[dict[str, str]] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Outputs:
        assert raw
        assert display_id
        assert not self.contents, "a second output"
        self.update(content, raw=True)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.contents.append(content)
        self.threads.add(threading.current_thread())


def ipython(monkeypatch: pytest.MonkeyPatch, kernel: object) -> Outputs:
    """What a program finds of IPython that runs in it."""
    outputs, package, displays = Outputs(), ModuleType("IPython"), ModuleType("IPython.display")
    shell = type("Shell", (), {"kernel": kernel} if kernel else {})()
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    displays.display = outputs.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return outputs


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outputs]:
    return ipython(monkeypatch, object())


def job(**status: Any) -> dict[str, Any]:
    metadata = {"name": "train", "namespace": "default", "uid": "job-1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"nodes": 1}, "status": status}


def served(server: Server, *jobs: dict[str, Any]) -> None:
    """The job at each time that it is read, at last the last one."""
    left = list(jobs)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/ddpjobs/" not in request.path:
            return ok({"metadata": {"resourceVersion": "1"}, "items": []})
        return ok(left.pop(0) if len(left) > 1 else left[0])

    server.answers = [answer]


def watched() -> DDPJobStatus:
    with Job.get("train", namespace="default") as found:
        return found.watch()


async def test_one_output_follows_the_job_to_its_end(server: Server, client: Client, notebook: Outputs) -> None:
    running = job(phase="Running", progress={"step": 1, "totalSteps": 4, "loss": 2.0})
    over = job(phase="Succeeded", progress={"step": 4, "totalSteps": 4, "loss": 1.0})
    served(server, running, running, running, over)
    status = await asyncio.to_thread(watched)
    assert status.phase is Phase.SUCCEEDED
    assert [content["text/plain"] for content in notebook.contents] == ["train: Running", "train: Succeeded"]
    first, last = (content["text/html"] for content in notebook.contents)
    assert '<progress aria-label="steps" value="1" max="4">' in first
    assert "step 4/4 (100%), loss 1" in last
    assert "█▁</span> loss" in last
    assert "ddpjob" not in {thread.name for thread in notebook.threads}, "a notebook shows what its own thread shows"


@pytest.mark.parametrize("refused", [False, True])
async def test_the_slowest_rank_is_shown_and_a_refusal_is_said_and_not_repeated(
    server: Server, client: Client, notebook: Outputs, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob_operator.follow.watch.SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("ddpjob_operator.follow.watch.LOOKS_BETWEEN_RANKS", 2)
    running = job(phase="Running", goodput={"training": 90.0, "saving": 10.0, "ratio": 0.9})
    left, asked = [running] * 7, []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/pods/train-0-0:9400/proxy/status"):
            asked.append(request.path)
            if refused:
                return web.json_response({"kind": "Status", "reason": "Forbidden", "message": "no"}, status=403)
            return web.json_response({"version": 1, "uid": "job-1", "attempt": 0, "ranks": RANKS})
        if "/ddpjobs/" in request.path:
            return ok(left.pop() if left else job(phase="Succeeded"))
        items = [POD] if request.path.endswith("/pods") else []
        return ok({"metadata": {"resourceVersion": "1"}, "items": items})

    server.answers = [answer]
    await asyncio.to_thread(watched)
    html = "".join(content["text/html"] for content in notebook.contents)
    assert "goodput 90%, saving 10%" in html
    assert ("the others wait for rank 1: it waits 50 ms longer" in html) is not refused
    assert ("ask for get on pods/proxy" in html) is refused
    assert len(asked) == (1 if refused else 3), "each second look"


def with_outages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that succeeds, at an API server that after its first two answers fails three times before each."""
    monkeypatch.setattr("ddpjob_operator.follow.outage.SECONDS_BETWEEN_TRIES", 0.01)
    asked, left = list[str](), [job(phase="Running")] * 3

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) > 2 and len(asked) % 4:
            return web.json_response({"kind": "Status", "reason": "InternalError", "message": "etcd"}, status=500)
        if "/ddpjobs/" in request.path:
            return ok(left.pop() if left else job(phase="Succeeded"))
        return ok({"metadata": {"resourceVersion": "1"}, "items": []})

    server.answers = [answer]


async def test_an_outage_of_the_api_server_does_not_end_the_watching(
    server: Server, client: Client, notebook: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob_operator.follow.watch.SECONDS_BETWEEN_LOOKS", 0.01)
    with_outages(server, monkeypatch)
    assert (await asyncio.to_thread(watched)).phase is Phase.SUCCEEDED
    assert "etcd; trying again" in "".join(content["text/html"] for content in notebook.contents)


async def test_an_outage_of_the_api_server_does_not_end_the_waiting(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.handle._SECONDS_BETWEEN_LOOKS", 0.01)
    with_outages(server, monkeypatch)
    async with await AsyncJob.get("train", namespace="default") as found:
        assert (await found.wait()).phase is Phase.SUCCEEDED


async def test_who_waits_so_many_seconds_waits_no_longer_for_a_server_that_is_away(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.handle._SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("ddpjob_operator.follow.outage.SECONDS_BETWEEN_TRIES", 0.01)
    away = web.json_response({"kind": "Status", "reason": "ServiceUnavailable"}, status=503)
    server.answers = [ok(job(phase="Running"))]
    async with await AsyncJob.get("train", namespace="default") as found:
        for seconds in (0.5, 5.0, 50.0):  # a busy machine may take half a second for one question
            before = len(server.asked)
            server.answers = [ok(job(phase="Running")), ok(job(phase="Running")), away]
            with pytest.raises(TimeoutError):
                await found.wait(seconds)
            if len(server.asked) > before + 3:
                break
    assert len(server.asked) > before + 3, "it tried again"


async def test_a_job_that_is_gone_ends_the_watching(server: Server, client: Client, notebook: Outputs) -> None:
    left = [job(phase="Running")] * 3

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/ddpjobs/" in request.path:
            return ok(left.pop()) if left else web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        return ok({"metadata": {"resourceVersion": "1"}, "items": []})

    server.answers = [answer]
    with pytest.raises(ApiError, match="there is no DDPJob train"):
        await asyncio.to_thread(watched)


OTHER = "train in namespace default was deleted, and another job has its name now"


def replaced(phase: str) -> dict[str, Any]:
    """The next job of the name."""
    found = job(phase=phase)
    return found | {"metadata": found["metadata"] | {"uid": "job-2"}}


async def test_the_job_that_replaces_the_one_that_is_watched_ends_the_watching(
    server: Server, client: Client, notebook: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob_operator.follow.watch.SECONDS_BETWEEN_LOOKS", 0.01)
    served(server, *[job(phase="Running")] * 3, replaced("Succeeded"))
    with pytest.raises(ApiError, match=OTHER):
        await asyncio.to_thread(watched)


@pytest.mark.parametrize(
    "ask",
    [
        lambda found: found.wait(),
        lambda found: found.watch(PlainDisplay()),
        lambda found: found.why(),
        lambda found: found.suspend(),
        lambda found: found.cancel(),
        lambda found: anext(found.logs()),
        lambda found: found.snapshots(),
    ],
    ids=["wait", "watch", "why", "suspend", "cancel", "logs", "snapshots"],
)
async def test_a_handle_is_of_its_job_and_not_of_another_one_that_has_the_name_now(
    server: Server, client: Client, ask: Callable[[AsyncJob], Awaitable[object]]
) -> None:
    served(server, job(phase="Running"), replaced("Succeeded"))
    async with await AsyncJob.get("train", namespace="default") as found:
        with pytest.raises(ApiError, match=OTHER):
            await ask(found)
    assert {request.method for request in server.asked} == {"GET"}, "nothing was changed"


def test_without_a_notebook_lines_or_a_live_view_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert isinstance(display_here(), PlainDisplay)
    ipython(monkeypatch, None)
    assert isinstance(display_here(), PlainDisplay), "IPython on a terminal"
    ipython(monkeypatch, object())
    assert isinstance(display_here(), NotebookDisplay)


def test_the_result_of_a_cell_is_one_line_below_the_output() -> None:
    assert pretty(DDPJobStatus()) == "<DDPJobStatus: new, attempt 0, restarts 0>"
    failed = DDPJobStatus(phase=Phase.FAILED, attempt=2, restarts=2)
    assert pretty(failed) == "<DDPJobStatus: Failed, attempt 2, restarts 2>"


def test_what_a_tenant_writes_stays_text() -> None:
    failure = FailureStatus(attempt=0, time=NOW, reason=EVIL, message=EVIL, advice=EVIL, pod_name=EVIL)
    status = DDPJobStatus(phase=Phase.FAILED, progress=Progress(step=1), last_failure=failure)
    node = NodeView(0, EVIL, EVIL, None, None, EVIL, None, EVIL)
    reports = Reports((RankRow(0, pod=EVIL, step_seconds=1.0),), note=EVIL)
    html = html_of(RunView(EVIL, status, (node,), NOW, NOW, reports=reports), EVIL, (EVIL,))
    assert EVIL not in html
    assert html.count("&lt;script&gt;") == 13
