"""A cluster as a source: what is asked once for many windows, what is remembered, and commands that can be typed."""

from __future__ import annotations

import asyncio
import gc
import shlex
import weakref
from datetime import UTC, datetime
from typing import Any, cast

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.answers import Server, ok, status

from ddpjob_operator.cli.main import app
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.page import cluster
from ddpjob_operator.page.answers import Answers
from ddpjob_operator.page.cluster import ClusterSource, pod_rows, record_of
from ddpjob_operator.page.server import make_app
from ddpjob_operator.page.values import Detail, LogQuery, SourceError
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError


def item(name: str = "digits", version: int = 1, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": f"uid of {name}", "resourceVersion": str(version)}
    return {
        "metadata": metadata | {"creationTimestamp": "2030-01-01T11:00:00Z"},
        "spec": {"nodes": 2, "procsPerNode": 4},
        "status": {
            "phase": "Running",
            "attempt": 1,
            "progress": {"step": version, "loss": 1 / version, "samplesPerSecond": 800.0},
        },
    } | more


class ApiServer:
    """Answers as one does; `asked` has what was read."""

    namespace = "team"

    def __init__(self, *items: dict[str, Any], log: tuple[str, ...] = (), forbidden: str = "") -> None:
        self.items, self.log, self.forbidden = list(items), log, forbidden
        self.asked: list[str] = []

    async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        self.asked.append(resource)
        await asyncio.sleep(0)
        if resource == self.forbidden:
            raise ApiError(403, "Forbidden", f'User "ann" cannot list resource "{resource}"')
        if resource == "ddpjobs":
            return self.items, 1
        pod = {
            "metadata": {
                "name": "digits-1-0", "uid": "p", "labels": {
                    "training.ddpjob.io/attempt": "1", "training.ddpjob.io/node-rank": "0"
                }, "ownerReferences": [{"uid": "uid of digits", "controller": True}],
            }, "spec": {}, "status": {"phase": "Running"},
        }  # fmt: skip
        return [pod] if resource == "pods" else [], 1

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        self.asked.append(path)
        found = [job for job in self.items if path.endswith(f"/{job['metadata']['name']}")]
        if not found:
            raise ApiError(404, "NotFound", "not found")
        return found[0]

    async def bounded(self, path: str, most: int, seconds: float) -> bytes:
        return b""

    async def lines(self, path: str, **query: str) -> Any:
        for line in self.log:
            yield line


def source(server: ApiServer, namespace: str | None = "team", context: str | None = None) -> ClusterSource:
    return ClusterSource(cast(Client, server), namespace, context)


async def detail(server: ApiServer, found: ClusterSource | None = None) -> Detail:
    shown = await (found or source(server)).detail("team", "digits")
    assert shown is not None
    return shown


async def test_windows_that_ask_at_once_or_soon_share_an_answer() -> None:
    server = ApiServer(item())
    found = source(server)
    await asyncio.gather(*(found.jobs() for _ in range(10)))
    await found.jobs()
    assert server.asked == ["ddpjobs"]


async def test_an_answer_is_shared_for_ten_times_as_long_as_it_took() -> None:
    times = iter([0.0, 0.0, 3.0, 32.0, 40.0, 41.0, 41.0])
    answers, asked = Answers(1.5, lambda: next(times)), []

    async def ask() -> int:
        asked.append(1)
        return len(asked)

    assert [await answers.get("jobs", ask) for _ in range(3)] == [1, 1, 2]


async def test_a_question_that_failed_is_asked_again() -> None:
    answers = Answers(60)

    async def refuse() -> int:
        raise ApiError(0, "Timeout", "no answer")

    async def ask() -> int:
        return 1

    with pytest.raises(ApiError):
        await answers.get("jobs", refuse)
    assert await answers.get("jobs", ask) == 1


async def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(SourceError, match="ask for the role view or edit"):
        await source(ApiServer(forbidden="ddpjobs")).jobs()


async def test_without_the_right_to_read_events_the_rest_is_shown_with_a_note() -> None:
    found = await detail(ApiServer(item(), forbidden="events"))
    assert found.notes == ('Events cannot be read: User "ann" cannot list resource "events"',)
    assert [pod.name for pod in found.pods] == ["digits-1-0"]


GPUS: dict[str, Any] = {"nodes": 2, "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": "64"}}}


async def test_the_ranks_of_a_pod_are_those_of_its_gpus() -> None:
    """Without procsPerNode there is a rank for each GPU: lines had the numbers of other ranks, and most had no page."""
    server = ApiServer(item(spec=GPUS), log=("2030-01-01T11:00:00Z [local rank 3] hello",))
    logs = source(server)._logs("team", item(spec=GPUS), LogQuery(rank=11))
    assert (logs.ranks_per_node, logs.wanted.node_of(logs.ranks_per_node)) == (8, 1)
    assert record_of(item(spec=GPUS)).ranks_per_node == 8
    assert record_of(item(spec=GPUS | {"procsPerNode": 2})).ranks_per_node == 2
    assert record_of(item(spec={"nodes": 2})).ranks_per_node == 1


def test_a_count_of_thousands_of_digits_leaves_the_list_of_jobs_as_it_is() -> None:
    """One that a list cannot be made of would hide the jobs of all others."""
    many = {"resources": {"limits": {"nvidia.com/gpu": "9" * 5000}}}
    assert record_of(item(spec=many)).ranks_per_node == 1


async def test_losses_are_remembered_of_what_was_seen_and_of_the_log() -> None:
    server = ApiServer(item(version=4), log=("2030-01-01T11:00:00Z step 2 of 9, epoch 0, loss 2.5000, 10 samples/s",))
    found = source(server)
    first = await found._detail("team", "digits")
    server.items = [item(version=5)]
    second = await found._detail("team", "digits")
    assert first is not None
    assert second is not None
    assert [(point.step, point.loss) for point in first.course.kept] == [(2, 2.5), (4, 0.25)]
    assert [point.samples_per_second for point in first.course.kept] == [10.0, 800.0]
    assert [point.step for point in second.course.kept] == [2, 4, 5]
    server.items = [item(version=1) | {"metadata": item()["metadata"] | {"uid": "of a new job"}}]
    anew = await found._detail("team", "digits")
    assert anew is not None
    assert [point.step for point in anew.course.kept] == [1]


def at(step: int, attempt: int) -> dict[str, Any]:
    found = item(version=step)
    found["status"]["attempt"] = attempt
    return found


def printed(*steps: int) -> tuple[str, ...]:
    return tuple(f"2030-01-01T11:00:00Z step {step} of 90, epoch 0, loss 1.0000" for step in steps)


async def courses(*looks: tuple[dict[str, Any], tuple[str, ...]]) -> list[list[list[int]]]:
    """The steps that are kept, and those that are lost, at each look at a job and its log."""
    found = source(server := ApiServer())
    shown = []
    for job, log in looks:
        server.items, server.log = [job], log
        seen = await found._detail("team", "digits")
        assert seen is not None
        shown.append([[point.step for point in points] for points in (seen.course.kept, seen.course.lost)])
    return shown


@pytest.mark.parametrize("kept", [False, True], ids=["new pods", "in place"])
async def test_steps_that_a_restart_has_taken_back_are_lost(kept: bool) -> None:
    """The status says of the new attempt what the one before had reached, until it reports a step itself."""
    shown = await courses(
        (at(42, 0), printed(20, 40)),
        (at(57, 0), printed(20, 40, 50)),
        (at(57, 1), printed(20, 40, 50)),
        (at(44, 1), printed(20, 40, 50, 43) if kept else printed(43)),
        (at(46, 1), printed(20, 40, 50, 43, 45) if kept else printed(43, 45)),
    )
    assert shown == [
        [[20, 40, 42], []],
        [[20, 40, 42, 50, 57], []],
        [[20, 40, 42, 50, 57], []],
        [[20, 40, 42, 43, 44], [50, 57]],
        [[20, 40, 42, 43, 44, 45, 46], [50, 57]],
    ]


async def test_a_step_that_was_seen_before_the_status_went_back_to_it_is_not_lost() -> None:
    """The log of the new attempt is ahead of its status, which has the step of the one before."""
    shown = await courses((at(57, 0), printed(40, 50)), (at(57, 1), printed(43, 45)), (at(44, 1), printed(43, 45)))
    assert shown[-1] == [[40, 43, 44, 45], [50, 57]]


@pytest.mark.parametrize("query", [LogQuery(tail=5000), LogQuery(rank=0, tail=5000)])
async def test_the_lines_of_a_page_are_bounded_in_memory_also_where_they_are_long(
    query: LogQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_LOG_BYTES", 100_000)
    long = tuple(f"2030-01-01T00:00:{second:02}Z {second} {'x' * 10_000}" for second in range(60))
    lines = await source(ApiServer(item(), log=long)).log("team", "digits", query)
    assert lines is not None
    assert [line.text.split()[0] for line in lines] == [str(second) for second in range(51, 60)]


async def test_a_window_that_takes_no_lines_leaves_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_MOST_LINES_AHEAD", 3)
    log = tuple(f"2030-01-01T00:00:{second:02}Z {second}" for second in range(60))
    ended = item() | {"status": {"phase": "Succeeded", "attempt": 1}}
    shown = source(ApiServer(ended, log=log)).follow("team", "digits", LogQuery())
    texts = [line.text async for line in shown]
    assert texts == ["57", "58", "59"]


MANY = "9" * 5000


@pytest.mark.parametrize("line", [
    f"step {MANY} of 9, loss 1.0", f"step 1 of 9, loss {MANY}.0", f"step 1 of 9, loss 1.0, {MANY} samples/s",
])  # fmt: skip
@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
async def test_what_a_job_prints_and_reports_keeps_its_page_from_nobody(line: str, value: float) -> None:
    progress = {"step": 2**63 - 1, "totalSteps": 2**63 - 1, "loss": value, "samplesPerSecond": value}
    job = item() | {"status": {"phase": "Running", "progress": progress, "attempt": 1}}
    log = tuple(f"2030-01-01T00:00:01Z {text}" for text in (line, "step 1 of 9, loss 1.0, 5 samples/s"))
    async with TestClient(TestServer(make_app(source(ApiServer(job, log=log))))) as browser:
        for path in ("/", "/jobs/team/digits", "/jobs/team/digits/logs"):
            assert (await browser.get(path)).status == 200


async def test_an_answer_is_not_held_longer_than_it_is_shared() -> None:
    now = [0.0]
    answers = Answers(1.0, clock=lambda: now[0])
    found = await answers.get("first", _something)
    held = weakref.ref(found)
    del found
    now[0] = 2.0
    await answers.get("second", _something)
    gc.collect()
    assert held() is None


async def _something() -> ApiServer:
    return ApiServer()


async def test_a_log_that_cannot_be_followed_any_more_is_no_end_of_the_job() -> None:
    server = ApiServer(item())
    found = source(server).follow("team", "digits", LogQuery())
    following = asyncio.create_task(anext(found))
    await asyncio.sleep(0)
    server.forbidden = "pods"
    with pytest.raises(SourceError, match="cannot list resource"):
        await following


async def test_another_namespace_than_the_one_that_was_asked_for_has_no_jobs() -> None:
    server = ApiServer(item())
    assert await source(server).detail("default", "digits") is None
    assert await source(server).log("default", "digits", LogQuery()) is None
    assert server.asked == []


@pytest.mark.parametrize("namespace", ["team", None])
@pytest.mark.parametrize(
    "part",
    [
        "team/..%2F..%2F..%2Fnamespaces%2Fother%2Fddpjobs%2Fdigits",
        "team/..%2F..%2F..%2F..%2F..%2F..%2Fapi%2Fv1%2Fnamespaces%2Fteam%2Fpods%2Fdigits%3Fall=1",
        "team/digits%2Fstatus",
        "team/digits%3Fpretty=true",
        "team/digits%23",
        "team/Digits",
        "team/%2E%2E%2F",
        "..%2Fnamespaces%2Fother/digits",
        "team%2Fddpjobs%2Fdigits%3F/digits",
        "te.am/digits",
    ],
)
async def test_no_url_of_a_page_leads_to_another_path_of_the_api_server(
    server: Server, client: Client, part: str, namespace: str | None
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/digits") or "/digits/" in request.path:
            return ok(item())
        return status(404, "NotFound")

    server.answers = [answer]
    async with TestClient(TestServer(make_app(ClusterSource(client, namespace)))) as browser:
        for rest in ("", "/logs", "/logs/stream"):
            assert (await browser.get(f"/jobs/{part}{rest}")).status == 404, rest
    assert server.asked == []


async def test_a_job_of_any_valid_name_has_a_page(server: Server, client: Client) -> None:
    name = f"a.b-{'0' * 249}"

    async def answer(request: web.Request) -> web.StreamResponse:
        items: dict[str, Any] = {"metadata": {"resourceVersion": "1"}, "items": []}
        return ok(item(name) if request.path.endswith(f"/namespaces/0-team/ddpjobs/{name}") else items)

    server.answers = [answer]
    async with TestClient(TestServer(make_app(ClusterSource(client, None)))) as browser:
        assert (await browser.get(f"/jobs/0-team/{name}")).status == 200


@pytest.mark.parametrize("phase", ["Running", "Suspended", "Succeeded", "Pending"])
async def test_every_command_can_be_typed(phase: str) -> None:
    server = ApiServer(item(status={"phase": phase}))
    found = source(server, context="a b")
    texts = [command.text for command in (await detail(server, found)).commands]
    for text in (*texts, found.start_command):
        program, *words = shlex.split(text)
        assert program == "ddpjob"
        command: Any = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        given = command.make_context("ddpjob", words).params
        assert (given["namespace"], given["context"]) == ("team", "a b")
    assert any(" unsuspend " in text for text in texts) == (phase == "Suspended")
    assert any(" cancel " in text for text in texts) == (phase != "Succeeded")


def test_a_job_that_is_deleted_is_terminating() -> None:
    gone = item() | {"metadata": item()["metadata"] | {"deletionTimestamp": "2030-01-01T12:00:00Z"}}
    assert record_of(gone).phase == "Terminating"
    assert record_of(item(status={})).phase == "Pending"


def test_pods_say_what_they_do() -> None:
    pods = [
        PodView("digits-1-s0", "a", 1, None, PodPhase.PENDING, reason="ErrImagePull", message="no\x1b[2J such image"),
        PodView("digits-1-1", "b", 1, 1, PodPhase.FAILED, termination=Termination(9)),
        PodView("digits-1-0", "c", 1, 0, PodPhase.RUNNING, ready=True, node_name="worker-1"),
        PodView("digits-0-0", "d", 0, 0, PodPhase.RUNNING, deleting=True),
    ]
    assert [(row.name, row.state, row.tone, row.detail) for row in pod_rows(pods)] == [
        ("digits-1-0", "Ready", "running", ""),
        ("digits-1-1", "Failed", "bad", "exit code 9"),
        ("digits-1-s0", "ErrImagePull", "waiting", "no[2J such image"),
        ("digits-0-0", "Terminating", "still", ""),
    ]


def test_times_are_those_of_the_api_server() -> None:
    assert record_of(item()).created == datetime(2030, 1, 1, 11, tzinfo=UTC)
