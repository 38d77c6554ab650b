"""A command in a pod, over a websocket as the API server speaks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web
from tests.unit.answers import Answer, Server, cut, status

from ddpjob_operator.runtime import client as api
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.execute import PROTOCOL, output_of

POD = "/api/v1/namespaces/default/pods/reader"
SUCCEEDED = b"\x03" + json.dumps({"metadata": {}, "status": "Success"}).encode()
FAILED = b"\x03" + json.dumps({"status": "Failure", "message": "command terminated with exit code 1"}).encode()
OPENED = [b"\x01", b"\x02", b"\x03"]
"""What a server sends first: nothing, on each channel."""


def says(*messages: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        assert socket.ws_protocol == PROTOCOL
        for message in messages:
            await socket.send_bytes(message)
        await socket.close()
        return socket

    return answer


async def read(client: Client) -> bytes:
    return b"".join([piece async for piece in output_of(client, POD, "snapshots", ("tail", "-c", "+1", "/a b"))])


async def test_bytes_come_as_they_are(server: Server, client: Client) -> None:
    server.answers = [says(*OPENED, b"\x01\x00\xff\n", b"\x02a warning", b"\x01\x03", SUCCEEDED)]
    assert await read(client) == b"\x00\xff\n\x03"
    (asked,) = server.asked
    assert asked.path == f"{POD}/exec"
    assert asked.query.getall("command") == ["tail", "-c", "+1", "/a b"]
    assert (asked.query["container"], asked.query["stdout"], asked.query["stderr"]) == ("snapshots", "true", "true")
    assert asked.headers["Authorization"] == "Bearer first"


@pytest.mark.parametrize(
    ("messages", "reason", "words"),
    [
        ((*OPENED, b"\x02tail: no such file\n", FAILED), "Failed", "failed: tail: no such file$"),
        ((*OPENED, FAILED), "Failed", "exit code 1"),
        ((*OPENED, b"\x01half"), "ConnectionFailed", "ended before the command did"),
        ((b"\x03nonsense",), "BadAnswer", "nonsense"),
    ],
)
async def test_a_command_that_did_not_succeed_is_an_error(
    server: Server, client: Client, messages: tuple[bytes, ...], reason: str, words: str
) -> None:
    server.answers = [says(*messages)]
    with pytest.raises(ApiError, match=words) as raised:
        await read(client)
    assert (raised.value.status, raised.value.reason) == (0, reason)


@pytest.mark.parametrize(
    ("code", "words"), [(403, "create on pods/exec"), (404, "pod reader is gone"), (500, "the server refused: 500")]
)
async def test_a_refusal_says_what_to_do(server: Server, client: Client, code: int, words: str) -> None:
    server.answers = [status(code, "Refused")]
    with pytest.raises(ApiError, match=words) as raised:
        await read(client)
    assert raised.value.status == code


async def test_a_token_that_has_expired_is_read_again(server: Server, client: Client, tmp_path: Path) -> None:
    """Some last 15 minutes. The second file of an export may begin later, and all of the first would be for nothing."""
    let_in = says(*OPENED, b"\x01rest", SUCCEEDED)

    async def only_second(request: web.Request) -> web.StreamResponse:
        right = request.headers["Authorization"] == "Bearer second"
        assert callable(let_in)
        return await let_in(request) if right else status(401, "Unauthorized")

    server.answers = [only_second]
    (tmp_path / "token").write_text("second")
    assert await read(client) == b"rest"
    assert len(server.asked) == 2


async def test_credentials_that_stay_refused_are_an_error(server: Server, client: Client) -> None:
    server.answers = [status(401, "Unauthorized")]
    with pytest.raises(ApiError, match="refused: 401"):
        await read(client)
    assert len(server.asked) == 2


async def test_a_connection_that_falls_silent_is_given_up(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        assert (await socket.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        return socket

    monkeypatch.setattr(api, "SILENCE_SECONDS", 0.2)
    server.answers = [silent]
    with pytest.raises(ApiError, match=r"silent for 0\.2 s") as raised:
        await read(client)
    assert raised.value.reason == "ConnectionFailed"


async def test_a_server_that_is_not_there_is_a_connection_that_failed(server: Server, client: Client) -> None:
    server.answers = [cut]
    with pytest.raises(ApiError) as raised:
        await read(client)
    assert (raised.value.status, raised.value.reason) == (0, "ConnectionFailed")
