"""A server that gives the answers that a test puts into it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = web.Response | Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Gives its answers one after another, the last one for ever, and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request) if callable(answer) else _copy(answer)


def _copy(answer: web.Response) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


def ok(value: Any) -> web.Response:
    return web.json_response(value)


def status(code: int, reason: str, message: str = "", **headers: str) -> web.Response:
    body = {"kind": "Status", "reason": reason, "message": message, "code": code}
    return web.json_response(body, status=code, headers=headers)


async def cut(request: web.Request) -> web.Response:
    """No answer: the connection is closed."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
