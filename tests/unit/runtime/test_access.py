"""Who may read /metrics: what the API server says of a token, for some seconds, and nothing where it says nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, web
from tests.support.ports import free_port
from tests.unit.answers import Server, ok, status

from ddpjob_operator import server as http
from ddpjob_operator.runtime.access import (
    ACCESS_REVIEWS,
    FORBIDDEN,
    OK,
    REFUSED_SECONDS,
    REMEMBERED,
    TOKEN_REVIEWS,
    UNAUTHORIZED,
    UNAVAILABLE,
    WAITING,
    Access,
)
from ddpjob_operator.runtime.client import Client

USER = {"username": "prometheus", "groups": ["monitoring"], "uid": "u", "extra": {"pod": ["a"]}}
KNOWN = ok({"status": {"authenticated": True, "user": USER}})
UNKNOWN = ok({"status": {"authenticated": False}})
YES, NO = ok({"status": {"allowed": True}}), ok({"status": {"allowed": False}})


class Reviews:
    """Answers by path, and what was asked."""

    def __init__(self, server: Server, token: web.Response = KNOWN, access: web.Response = YES) -> None:
        self.asked: list[tuple[str, Any]] = []
        answers = {TOKEN_REVIEWS: token, ACCESS_REVIEWS: access}

        async def answer(request: web.Request) -> web.Response:
            self.asked.append((request.path, (await request.json())["spec"]))
            found = answers[request.path]
            return web.Response(status=found.status, body=found.body, headers=found.headers)

        server.answers = [answer]


@pytest.mark.parametrize(
    ("token", "access", "wanted"),
    [
        (KNOWN, YES, OK),
        (KNOWN, NO, FORBIDDEN),
        (UNKNOWN, YES, UNAUTHORIZED),
        (ok({}), YES, UNAUTHORIZED),
        (KNOWN, ok({}), FORBIDDEN),
        (status(403, "Forbidden"), YES, UNAVAILABLE),
        (KNOWN, status(500, "InternalError"), UNAVAILABLE),
    ],
)
async def test_a_token_is_what_both_reviews_say(
    server: Server, client: Client, token: web.Response, access: web.Response, wanted: int
) -> None:
    Reviews(server, token, access)
    assert await Access(client, "/metrics").status("Bearer abc") == wanted


async def test_the_user_is_asked_about_with_all_that_is_known_of_it(server: Server, client: Client) -> None:
    reviews = Reviews(server)
    await Access(client, "/metrics").status("bearer  abc ")
    wanted = {"nonResourceAttributes": {"path": "/metrics", "verb": "get"}, "user": "prometheus"}
    wanted |= {name: USER[name] for name in ("groups", "uid", "extra")}
    assert reviews.asked == [(TOKEN_REVIEWS, {"token": "abc"}), (ACCESS_REVIEWS, wanted)]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic YTpi", "abc"])
async def test_without_a_token_nobody_is_asked(server: Server, client: Client, header: str) -> None:
    reviews = Reviews(server)
    assert await Access(client, "/metrics").status(header) == UNAUTHORIZED
    assert reviews.asked == []


async def test_an_answer_is_remembered_by_token_for_some_seconds(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviews, access, loop = Reviews(server, access=NO), Access(client, "/metrics"), asyncio.get_running_loop()
    for token in ("a", "a", "b"):
        assert await access.status(f"Bearer {token}") == FORBIDDEN
    assert len(reviews.asked) == 4
    began = loop.time()
    monkeypatch.setattr(loop, "time", lambda: began + REFUSED_SECONDS + 1)
    Reviews.__init__(reviews, server)
    assert await access.status("Bearer a") == OK
    assert len(reviews.asked) == 2


async def test_an_api_server_that_fails_is_asked_again(server: Server, client: Client) -> None:
    access = Access(client, "/metrics")
    Reviews(server, status(500, "InternalError"))
    assert await access.status("Bearer a") == UNAVAILABLE
    Reviews(server)
    assert await access.status("Bearer a") == OK


async def test_strangers_can_neither_fill_the_memory_nor_queue_without_end(server: Server, client: Client) -> None:
    Reviews(server, UNKNOWN)
    access = Access(client, "/metrics")
    for index in range(REMEMBERED + 10):
        await access.status(f"Bearer {index}")
    assert len(access._known) == REMEMBERED
    found = await asyncio.gather(*(access.status(f"Bearer more {index}") for index in range(WAITING + 5)))
    assert sorted(found) == [UNAUTHORIZED] * WAITING + [UNAVAILABLE] * 5


async def test_the_page_is_closed_and_the_probes_are_open() -> None:
    async def authorize(header: str) -> int:
        return {"Bearer good": OK, "Bearer other": FORBIDDEN}.get(header, UNAUTHORIZED)

    page, port = await http.serve_metrics(free_port(), authorize)
    probes, probe_port = await http.serve_probes(free_port(), healthy=list, ready=lambda: ["not yet"])
    try:
        async with ClientSession() as session:

            async def get(port: int, path: str, token: str = "") -> tuple[int, str, str]:
                headers = {"Authorization": token} if token else {}
                async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as found:
                    return found.status, found.headers.get("WWW-Authenticate", ""), await found.text()

            assert await get(port, "/metrics") == (401, "Bearer", "")
            assert await get(port, "/metrics", "Bearer other") == (403, "", "")
            assert "ddpjob_operator_build_info" in (await get(port, "/metrics", "Bearer good"))[2]
            assert await get(probe_port, "/healthz") == (200, "", "ok")
            assert await get(probe_port, "/readyz") == (503, "", "not yet")
            for elsewhere in ((port, "/healthz"), (probe_port, "/metrics")):
                assert (await get(*elsewhere))[0] == 404
    finally:
        await page.cleanup()
        await probes.cleanup()
