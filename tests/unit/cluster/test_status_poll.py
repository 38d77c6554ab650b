"""The questions to trainers over real HTTP: what answers there is a user's container, which may do anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok, status

from ddpjob_operator.cluster import status_poll
from ddpjob_operator.cluster.status_poll import StatusPoller, Target, pause_seconds
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.metrics import REGISTRY

TARGET = Target("127.0.0.1", "uid-1", 0)
REPORT = {"version": 1, "uid": "uid-1", "attempt": 0, "phase": "train", "step": 3}


@dataclass(eq=False)
class Heard:
    """What is heard of the trainer on that server, from the first `listen` on."""

    poller: StatusPoller
    reports: asyncio.Queue[TrainerReport]

    async def next(self) -> TrainerReport:
        async with asyncio.timeout(60):
            return await self.reports.get()

    def listen(self) -> None:
        self.poller.watch("digits", TARGET, lambda key, target, report: self.reports.put_nowait(report))


@pytest.fixture
async def heard(server: Server) -> AsyncIterator[Heard]:
    reports: asyncio.Queue[TrainerReport] = asyncio.Queue()
    port = urlsplit(server.url).port
    assert port is not None
    poller = StatusPoller(every=0.05, port=port)
    yield Heard(poller, reports)
    await poller.close()


async def test_nobody_is_asked_any_more_once_all_are_dropped(server: Server, heard: Heard) -> None:
    server.answers = [ok(REPORT) for _ in range(1000)]
    heard.listen()
    await heard.next()
    heard.poller.drop_all()
    asked = len(server.asked)
    await asyncio.sleep(5 * heard.poller.every)
    assert len(server.asked) <= asked + 1  # one may have been on its way


def polls(result: str) -> float:
    return REGISTRY.get_sample_value("ddpjob_operator_status_polls_total", {"result": result}) or 0.0


async def ends(heard: Heard, result: str) -> None:
    """Ask, until a question has ended like that."""
    before = polls(result)
    heard.listen()
    async with asyncio.timeout(60):
        while polls(result) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def stream(request: web.Request, chunk: bytes, pause: float) -> web.StreamResponse:
    """Send for ever, or until nobody listens."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionResetError):
        while True:
            await response.write(chunk)
            await asyncio.sleep(pause)
    return response


async def test_a_redirect_is_not_followed(server: Server, heard: Heard) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        if request.path == "/status":
            return web.Response(status=302, headers={"Location": "/elsewhere"})
        return ok(REPORT)

    server.answers = [elsewhere]
    await ends(heard, "refused")
    assert {request.path for request in server.asked} == {"/status"}
    assert heard.reports.empty()


async def test_an_answer_that_trickles_in_is_given_up_and_asked_for_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr(status_poll, "TIMEOUT_SECONDS", 0.2)
    server.answers = [lambda request: stream(request, b" ", 0.01), ok(REPORT)]
    await ends(heard, "failed")
    assert (await heard.next()).step == 3


async def test_an_answer_without_end_is_read_no_further_than_the_largest_and_refused(
    server: Server, heard: Heard
) -> None:
    server.answers = [lambda request: stream(request, b" " * 65536, 0.0), ok(REPORT)]
    await ends(heard, "refused")
    assert (await heard.next()).step == 3


async def test_it_is_known_for_how_long_a_trainer_has_not_answered(server: Server, heard: Heard) -> None:
    poller = heard.poller
    assert poller.silent_seconds("digits") == 0
    server.answers = [ok(REPORT), status(500, "no"), ok(REPORT), *(status(500, "no") for _ in range(1000))]
    heard.listen()
    await heard.next()
    await heard.next()
    assert poller.silent_seconds("digits") == 0, "one question alone was left unanswered"
    async with asyncio.timeout(60):
        while (first := poller.silent_seconds("digits")) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert first >= poller.every
    await asyncio.sleep(2 * poller.every)
    assert poller.silent_seconds("digits") >= first + 2 * poller.every, "from the first of them on"
    poller.watch("digits", TARGET._replace(attempt=1), lambda *_: None)
    assert poller.silent_seconds("digits") == 0, "another trainer is asked"


async def test_another_trainer_is_asked_as_long_as_the_first_one_does_not_train(server: Server, heard: Heard) -> None:
    steps = {"127.0.0.1": None, "localhost": 3}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(REPORT | {"step": steps[request.url.host or ""]})

    server.answers = [answer]
    heard.poller.watch(
        "digits", TARGET._replace(otherwise="localhost"), lambda *said: heard.reports.put_nowait(said[2])
    )
    assert (await heard.next()).step == 3
    steps["127.0.0.1"] = 5
    while (await heard.next()).step != 5:
        pass
    asked = len(server.asked)
    await heard.next()
    assert {request.url.host for request in server.asked[asked:]} == {"127.0.0.1"}


@pytest.mark.parametrize(("silent", "seconds"), [(0, 2.0), (10, 2.0), (11, 4.0), (14, 30.0), (10_000, 30.0)])
def test_a_trainer_that_never_answers_is_asked_less_often(silent: int, seconds: float) -> None:
    assert pause_seconds(2.0, silent, 1) == seconds


@pytest.mark.parametrize(("trainers", "seconds"), [(1, 2.0), (100, 2.0), (1000, 20.0), (10_000, 200.0)])
def test_many_trainers_are_asked_no_more_often_together(trainers: int, seconds: float) -> None:
    assert pause_seconds(2.0, 0, trainers) == seconds
    assert pause_seconds(2.0, 10_000, trainers) >= seconds


class Question(NamedTuple):
    namespace: str
    name: str


async def test_hung_trainers_of_one_namespace_leave_places_for_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_poll, "TIMEOUT_SECONDS", 600.0)
    never, asked = asyncio.Event(), 0

    async def hang(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await never.wait()
        return web.Response()

    server.answers = [hang]
    port = urlsplit(server.url).port
    assert port is not None
    poller = StatusPoller(every=0.05, port=port)
    answered: asyncio.Queue[str] = asyncio.Queue()

    def take(key: Question, target: Target, report: TrainerReport) -> None:
        answered.put_nowait(key.namespace)

    for number in range(100):
        poller.watch(Question("hung", str(number)), TARGET, take)
    async with asyncio.timeout(60):
        while asked < 48:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.answers = [ok(REPORT)]
        poller.watch(Question("research", "digits"), TARGET, take)
        assert await answered.get() == "research"
    never.set()
    await poller.close()
