"""The API client against a server that answers what the test says."""

from __future__ import annotations

import asyncio
import base64
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.waiting import PATIENCE_SECONDS, eventually_async
from tests.unit.answers import Server, cut, ok, status

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.runtime import client as api
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import Login, open_session
from ddpjob_operator.settings import VERSION


async def test_an_error_carries_the_servers_own_reason(server: Server, client: Client) -> None:
    server.answers = [status(403, "Forbidden", "exceeded quota: few")]
    with pytest.raises(ApiError) as raised:
        await client.create("/api/v1/pods", "pods", {})
    assert (raised.value.status, raised.value.reason, raised.value.message) == (403, "Forbidden", "exceeded quota: few")


async def test_an_answer_that_is_not_json_is_an_error_in_few_words(server: Server, client: Client) -> None:
    server.answers = [web.Response(status=502, text="<html>" + "x" * 10_000)]
    with pytest.raises(ApiError) as raised:
        await client.get("/api/v1/pods", "pods")
    assert raised.value.status == 502
    assert len(str(raised.value)) < 300


async def test_half_an_answer_is_an_error_and_not_a_value(server: Server, client: Client) -> None:
    server.answers = [web.Response(text='{"kind": "Po', content_type="application/json")]
    with pytest.raises(ApiError, match="not JSON"):
        await client.get("/api/v1/pods", "pods")


async def test_a_server_that_is_not_there_is_an_error_without_a_status(server: Server, client: Client) -> None:
    server.answers = [cut]
    with pytest.raises(ApiError) as raised:
        await client.create("/api/v1/pods", "pods", {})
    assert (raised.value.status, raised.value.reason) == (0, "ConnectionFailed")


@pytest.mark.fault(7)
@pytest.mark.parametrize(("call", "seconds"), [(Client.get, 0.2), (Client.delete, 0.3)], ids=["a read", "a write"])
async def test_a_server_that_hangs_is_given_up(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Awaitable[Any]], seconds: float
) -> None:
    """A write later: an admission webhook may take 30 s, and the API server gives up after 34 s."""
    never = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    assert api.WRITE_SECONDS > 34
    monkeypatch.setattr(api, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(api, "WRITE_SECONDS", 0.3)
    server.answers = [hang]
    with pytest.raises(ApiError, match=f"no answer within {seconds} s"):
        await call(client, "/api/v1/pods", "pods")
    never.set()


@pytest.mark.fault(8)
async def test_a_watch_that_falls_silent_ends(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watches of Services, claims and the like: its caller begins anew."""
    never = asyncio.Event()

    async def one_event(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type": "ADDED", "object": {}}\n')
        await never.wait()
        return response

    assert api.SILENCE_SECONDS == 70
    monkeypatch.setattr(api, "SILENCE_SECONDS", 0.2)
    server.answers = [one_event]
    events = client.watch("/api/v1/services", 7)
    async with asyncio.timeout(60):
        assert (await anext(events))["type"] == "ADDED"
        with pytest.raises(StopAsyncIteration):
            await anext(events)
    never.set()


async def test_a_busy_server_is_asked_again_when_it_said(server: Server, client: Client) -> None:
    server.answers = [status(429, "TooManyRequests", **{"Retry-After": "0"}), ok({"kind": "Pod"})]
    assert await client.get("/api/v1/pods", "pods") == {"kind": "Pod"}
    assert len(server.asked) == 2


async def test_a_wait_that_is_too_long_is_left_to_the_caller(server: Server, client: Client) -> None:
    server.answers = [status(429, "TooManyRequests", **{"Retry-After": "3600"})]
    with pytest.raises(ApiError) as raised:
        await client.get("/api/v1/pods", "pods")
    assert raised.value.status == 429


async def test_after_a_401_the_token_is_read_again_once_for_all(server: Server, client: Client, tmp_path: Path) -> None:
    async def only_second(request: web.Request) -> web.Response:
        right = request.headers["Authorization"] == "Bearer second"
        return ok({"kind": "Pod"}) if right else status(401, "Unauthorized")

    server.answers = [only_second]
    (tmp_path / "token").write_text("second")
    answers = await asyncio.gather(*(client.get("/api/v1/pods", "pods") for _ in range(5)))
    assert answers == [{"kind": "Pod"}] * 5


async def test_a_watch_goes_on_when_others_have_to_log_in_again(
    server: Server, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in, and lasts for minutes; where tokens last for an hour, all of them would break once an hour."""
    opened: list[aiohttp.ClientSession] = []
    changed = asyncio.Event()

    def recorded(login: Login) -> aiohttp.ClientSession:
        opened.append(open_session(login))
        return opened[-1]

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            right = request.headers["Authorization"] == "Bearer second"
            return ok({}) if right else status(401, "Unauthorized")
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type": "ADDED", "object": {}}\n')
        await changed.wait()
        await response.write(b'{"type": "MODIFIED", "object": {}}\n')
        return response

    monkeypatch.setattr(api, "open_session", recorded)
    server.answers = [answer]
    watching = await connect(in_flight=2)
    try:
        events = watching.watch("/api/v1/pods", 1)
        assert (await anext(events))["type"] == "ADDED"
        (tmp_path / "token").write_text("second")
        assert await watching.get("/api/v1/pods", "pods") == {}
        assert [session.closed for session in opened] == [False, False]
        changed.set()
        assert [event["type"] async for event in events] == ["MODIFIED"]
        assert [session.closed for session in opened] == [True, False]
    finally:
        changed.set()
        await watching.close()
    assert [session.closed for session in opened] == [True, True]


async def test_the_operator_and_the_command_can_be_told_apart(server: Server, client: Client) -> None:
    """In the audit log of the API server, also after a new login."""

    async def ask(command: Client, namespace: str) -> int:
        await command.get("/api/v1/pods", "pods")
        return 0

    server.answers = [ok({}), status(401, "Unauthorized"), ok({})]
    await client.get("/api/v1/pods", "pods")
    await asyncio.to_thread(asked, Cluster(), ask)
    agents = [request.headers["User-Agent"] for request in server.asked]
    assert agents == [f"ddpjob-operator/{VERSION}", *[f"ddpjob-cli/{VERSION}"] * 2]
    encodings = [request.headers["Accept-Encoding"] for request in server.asked]
    assert [encoding == "identity" for encoding in encodings] == [True, False, False], "people may be far away"


async def test_a_401_that_stays_is_an_error(server: Server, client: Client) -> None:
    server.answers = [status(401, "Unauthorized")]
    with pytest.raises(ApiError) as raised:
        await client.get("/api/v1/pods", "pods")
    assert raised.value.status == 401
    assert len(server.asked) == 2


async def test_a_401_of_an_admission_webhook_says_nothing_about_the_token(server: Server, client: Client) -> None:
    server.answers = [status(401, "Unauthorized", 'admission webhook "a" denied the request: who are you?')]
    with pytest.raises(ApiError):
        await client.get("/api/v1/pods", "pods")
    assert len(server.asked) == 1


async def test_no_more_calls_are_in_flight_than_allowed(server: Server, client: Client) -> None:
    now = most = 0

    async def count(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return ok({})

    server.answers = [count]
    await asyncio.gather(*(client.get("/api/v1/pods", "pods") for _ in range(8)))
    assert most == 2


async def test_a_namespace_that_waits_for_its_calls_leaves_places_to_others(server: Server, client: Client) -> None:
    """1,024 creates behind a slow admission webhook of one tenant do not hold up another's."""
    answered = asyncio.Event()

    async def slow_for_one(request: web.Request) -> web.Response:
        if "/tenant-a/" in request.path:
            await answered.wait()
        return ok({})

    async def taken() -> bool:
        return len(server.asked) >= 6

    server.answers = [slow_for_one]
    shared = await connect(in_flight=8)
    creates = [asyncio.create_task(shared.create("/api/v1/namespaces/tenant-a/pods", "pods", {})) for _ in range(64)]
    try:
        await eventually_async(taken, "three quarters of the places are taken")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await shared.get("/api/v1/namespaces/tenant-b/pods", "pods")
        assert len([request for request in server.asked if "/tenant-a/" in request.path]) == 6
    finally:
        answered.set()
        await asyncio.gather(*creates)
        await shared.close()


async def test_a_list_is_read_to_its_last_page(server: Server, client: Client) -> None:
    server.answers = [
        ok({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"n": 1}]}),
        ok({"metadata": {"resourceVersion": "7"}, "items": [{"n": 2}]}),
    ]
    assert await client.list("/api/v1/pods", "pods", labelSelector="a=b") == ([{"n": 1}, {"n": 2}], 7)
    assert [request.query.get("continue") for request in server.asked] == [None, "more"]
    assert all(request.query["labelSelector"] == "a=b" for request in server.asked)


async def test_the_next_page_is_on_its_way_while_one_is_taken_in(server: Server, client: Client) -> None:
    async def both_asked() -> bool:
        return len(server.asked) == 2

    server.answers = [
        ok({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"n": 1}]}),
        ok({"metadata": {"resourceVersion": "7"}, "items": [{"n": 2}]}),
    ]
    found = []
    async for page in client.pages("/api/v1/pods", "pods"):
        await eventually_async(both_asked, "the next page is asked for")
        found.append((page.items, page.first))
    assert found == [([{"n": 1}], True), ([{"n": 2}], False)]


async def test_a_list_that_is_not_read_to_its_end_leaves_no_call_behind(server: Server, client: Client) -> None:
    answered = asyncio.Event()

    async def late(request: web.Request) -> web.Response:
        await answered.wait()
        return ok({"metadata": {"resourceVersion": "7"}, "items": []})

    server.answers = [ok({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"n": 1}]}), late]
    pages = client.pages("/api/v1/pods", "pods")
    try:
        await anext(pages)
        (call,) = (task for task in asyncio.all_tasks() if task.get_name() == "page of pods")
        await pages.aclose()
        await asyncio.wait([call], timeout=10)
        assert call.cancelled()
    finally:
        answered.set()


async def test_a_list_that_expires_midway_starts_over(server: Server, client: Client) -> None:
    server.answers = [
        ok({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"n": 1}]}),
        status(410, "Expired"),
        ok({"metadata": {"resourceVersion": "9"}, "items": [{"n": 3}]}),
    ]
    assert await client.list("/api/v1/pods", "pods") == ([{"n": 3}], 9)


@pytest.mark.parametrize(("code", "headers"), [(503, {}), (429, {"Retry-After": "3600"})], ids=["503", "429"])
@pytest.mark.parametrize("call", [Client.get, Client.list])
async def test_a_call_that_is_refused_leaves_nothing_to_the_garbage_collector(
    server: Server,
    client: Client,
    call: Callable[[Client, str, str], Awaitable[object]],
    code: int,
    headers: dict[str, str],
) -> None:
    """What is there at a full collection, as a call on its way, it does not look at again (`runtime.garbage`)."""
    server.answers = [status(code, "Refused", **headers)]
    refused: list[weakref.ref[ApiError]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            try:
                await call(client, "/api/v1/pods", "pods")
            except ApiError as error:
                refused.append(weakref.ref(error))
        await asyncio.sleep(0)  # the loop lets go of the task that has ended
        assert [error() for error in refused] == [None, None, None]
    finally:
        gc.enable()


async def test_a_fence_stops_changes_and_lets_reads_pass(server: Server, client: Client) -> None:
    def fence() -> None:
        raise ApiError(0, "NotLeading", "somebody else leads")

    client.fence = fence
    server.answers = [ok({})]
    await client.get("/api/v1/pods", "pods")
    for change in (client.create("/a", "a", {}), client.merge_patch("/a", "a", {}), client.delete("/a", "a")):
        with pytest.raises(ApiError, match="somebody else leads"):
            await change
    assert len(server.asked) == 1


async def test_a_configuration_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(ApiError, match="missing"):
        await connect()


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: a
contexts: [{{name: a, context: {{cluster: a, user: a}}}}]
clusters: [{{name: a, cluster: {{server: "https://127.0.0.1:1"{of_cluster}}}}}]
users: [{{name: a, user: {{{of_user}}}}}]
"""
NO_PEM = base64.b64encode(b"no certificate").decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("clusters: [1\n b: {", "cannot use the kubeconfig .*, line 2"),
        (
            KUBECONFIG.format(of_cluster=f", certificate-authority-data: {NO_PEM}", of_user=""),
            "certificates for https:",
        ),
        (
            KUBECONFIG.format(of_cluster="", of_user=f"client-certificate-data: {NO_PEM}, client-key-data: {NO_PEM}"),
            "certificates for https:",
        ),
    ],
    ids=["no YAML", "no authority", "no client certificate"],
)
async def test_a_configuration_that_cannot_be_used_says_so(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, not a traceback; and an operator whose token has expired tries again."""
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ApiError, match=said) as refused:
        await connect()
    assert "\n" not in str(refused.value)


async def test_a_line_that_never_ends_has_its_beginning_and_its_end(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_HALF_A_LINE", 10)
    text = "first\n" + "".join(f"{number:04}\r" for number in range(9_000)) + "\n\nlast"
    server.answers = [web.Response(text=text)]
    lines = [line async for line in client.lines("/log")]
    assert lines == ["first", "0000\r0001\r8998\r8999\r", "", "last"]


async def test_the_time_for_a_long_line_grows_with_its_length_alone(server: Server, client: Client) -> None:
    """Of 32 MiB that come in 512 parts, no part is copied more than a few times."""
    server.answers = [web.Response(body=b"x" * 2**25)]
    before = time.process_time()
    (line,) = [line async for line in client.lines("/log")]
    assert time.process_time() - before < 2.0
    assert len(line) <= 2**22
