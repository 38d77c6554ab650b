"""Deliveries to a receiver that fails, hangs, redirects and comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from tests.support.ports import free_port
from tests.support.waiting import eventually_async

from ddpjob_operator import metrics
from ddpjob_operator.runtime import webhook
from ddpjob_operator.runtime.webhook import TRIES, WAITING, Webhook, pause_seconds, proxy_to

SECRET = "s3cret-path"


@dataclass
class Receiver:
    """Answers with these status codes one after another, the last one for ever."""

    codes: list[int] = field(default_factory=lambda: [204])
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is answered until it is set."""
    most_at_once: int = 0
    url: str = ""
    _now: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            self.got.append((request.path, dict(request.headers), await request.read()))
            await self.held.wait()
            code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
            return web.Response(status=code, headers={"Location": "/elsewhere"} if code // 100 == 3 else {})
        finally:
            self._now -= 1


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    found.held.set()
    app = web.Application()
    app.router.add_post("/{path:.*}", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{SECRET}"
    yield found
    found.held.set()
    await runner.cleanup()


@pytest.fixture
async def sender(receiver: Receiver) -> AsyncIterator[Webhook]:
    found = Webhook(receiver.url, "token-1", "application/cloudevents+json", pause=lambda tried: 0.0)
    yield found
    await found.close()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever happens, no log has the URL or the token."""
    caplog.set_level(logging.DEBUG)
    yield
    ours = [each.getMessage() for each in caplog.records if not each.name.startswith("aiohttp.access")]
    assert not [line for line in ours if SECRET in line or "token-1" in line]


def counted() -> dict[str, float]:
    return {name: metrics.NOTIFICATIONS.labels(result=name)._value.get() for name in ("delivered", "failed")}


async def outcome(sender: Webhook, key: str = "job-1") -> bool:
    """What becomes of one document."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    assert sender.offer(key, lambda: b'{"id": "1"}', done.set_result)
    return await done


async def test_an_event_is_posted_once(receiver: Receiver, sender: Webhook) -> None:
    before = counted()
    assert await outcome(sender)
    ((path, headers, body),) = receiver.got
    assert (path, body) == (f"/{SECRET}", b'{"id": "1"}')
    assert headers["Content-Type"] == "application/cloudevents+json"
    assert headers["Authorization"] == "Bearer token-1"
    assert counted() == {**before, "delivered": before["delivered"] + 1}


async def test_a_receiver_outside_is_reached_through_the_proxy_of_the_environment(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy is asked with the whole URL; no name server knows this receiver."""
    proxy, _, _ = receiver.url.rpartition("/")
    for name, value in (("HTTP_PROXY", proxy), ("NO_PROXY", ".svc"), ("http_proxy", ""), ("no_proxy", "")):
        monkeypatch.setenv(name, value)
    sender = Webhook(f"http://receiver.invalid/{SECRET}", pause=lambda tried: 0.0)
    try:
        assert await outcome(sender)
    finally:
        await sender.close()
    assert [(path, headers["Host"]) for path, headers, _ in receiver.got] == [(f"/{SECRET}", "receiver.invalid")]


@pytest.mark.parametrize(
    ("host", "is_used"),
    [
        ("hooks.example", True),
        ("svc.hooks.example", True),
        ("[2001:db8::1]", True),
        ("192.0.2.1", True),
        ("127.0.0.1", False),
        ("receiver", False),
        ("receiver.team.svc", False),
        ("receiver.team.svc.cluster.local.", False),
    ],
)
def test_a_service_is_reached_without_the_proxy(monkeypatch: pytest.MonkeyPatch, host: str, is_used: bool) -> None:
    proxy = "http://proxy.example:3128"
    for name, value in (("HTTP_PROXY", proxy), ("NO_PROXY", ""), ("http_proxy", ""), ("no_proxy", "")):
        monkeypatch.setenv(name, value)
    assert proxy_to(f"http://{host}:8080/hook") == (proxy if is_used else None)


@pytest.mark.parametrize(
    ("codes", "delivered", "requests"),
    [
        pytest.param([500, 503, 429, 200], True, 4, id="it comes back"),
        pytest.param([500, 500, 500, 500, 200], True, TRIES, id="at the last try"),
        pytest.param([500], False, TRIES, id="it does not come back"),
        pytest.param([400], False, 1, id="it refuses the event"),
        pytest.param([401], False, 1, id="it refuses the token"),
        pytest.param([302], False, 1, id="it redirects"),
        pytest.param([307], False, 1, id="it redirects with the method"),
    ],
)
async def test_what_may_pass_is_tried_again(
    receiver: Receiver, sender: Webhook, codes: list[int], delivered: bool, requests: int
) -> None:
    receiver.codes = codes
    before = counted()
    assert await outcome(sender) == delivered
    assert [path for path, _, _ in receiver.got] == [f"/{SECRET}"] * requests
    name = "delivered" if delivered else "failed"
    assert counted() == {**before, name: before[name] + 1}


async def test_a_receiver_that_is_not_there_or_hangs_is_tried_again(
    receiver: Receiver, sender: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender.url = f"http://127.0.0.1:{free_port()}/{SECRET}"
    assert not await outcome(sender)
    assert "no connection (ClientConnectorError)" in caplog.text
    await sender.close()
    monkeypatch.setattr(webhook, "TIMEOUT_SECONDS", 0.05)
    hung = Webhook(receiver.url, pause=lambda tried: 0.0)
    receiver.held.clear()
    assert not await outcome(hung)
    assert "no answer within" in caplog.text
    await hung.close()


async def test_a_few_are_sent_at_once_and_nobody_waits(receiver: Receiver, sender: Webhook) -> None:
    receiver.held.clear()
    done: list[bool] = []
    for number in range(20):
        assert sender.offer(f"job-{number}", lambda: b"{}", done.append)
    assert not receiver.got, "nothing was waited for"

    async def full() -> bool:
        return len(receiver.got) >= webhook.AT_ONCE

    await eventually_async(full, "requests have begun")
    receiver.held.set()

    async def all_done() -> bool:
        return len(done) == 20

    await eventually_async(all_done, "all are delivered")
    assert receiver.most_at_once == webhook.AT_ONCE == 4


async def test_what_is_on_its_way_is_not_sent_twice_and_there_is_an_end_to_what_waits(
    receiver: Receiver, sender: Webhook
) -> None:
    receiver.held.clear()
    done: list[bool] = []
    body: Callable[[], bytes] = lambda: b"{}"  # noqa: E731
    assert [sender.offer(f"job-{number}", body, done.append) for number in range(WAITING + 1)] == [
        *[True] * WAITING,
        False,
    ]
    assert sender.offer("job-0", body, done.append), "it is on its way"
    assert len(sender._sending) == WAITING
    sender.drop_all()
    assert sender.offer("job-0", body, done.append)
    receiver.held.set()

    async def one_done() -> bool:
        return done == [True]

    await eventually_async(one_done, "the one after the drop is delivered, and the others are not")


def test_pauses_grow_and_differ() -> None:
    assert [pause_seconds(tried, 0.5) for tried in (1, 2, 3, 4)] == [2, 8, 32, 128]
    assert (pause_seconds(1, 0.0), pause_seconds(1, 1.0)) == (1, 3)


def test_its_text_has_no_secret() -> None:
    assert SECRET not in repr(Webhook(f"https://hooks.example/{SECRET}", SECRET))
