"""A proxy between the operator and the API server that does to chosen calls what networks, crashes and busy servers do.

It numbers the calls that change something on behalf of jobs (no Leases, no Events) from 0 in each namespace, in the
order in which they arrive, and asks its `fault` what to do with each. Reads pass, unless `read_fault` says otherwise.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

from ddpjob_operator.runtime.login import Login

HOP_BY_HOP = {
    "connection",
    "transfer-encoding",
    "content-length",
    "host",
    "keep-alive",
    "content-encoding",
    "accept-encoding",
}


WINDOW_SECONDS = 0.2


class Fault(Enum):
    """What becomes of one call."""

    PASS = "passed on"
    KILL_BEFORE = "the operator is killed before the call arrives"
    KILL_AFTER = "the operator is killed when the call has taken effect"
    TERM = "the operator is told to stop (SIGTERM) while it waits for the answer"
    LOST = "the call takes effect, its answer is lost"
    HALF = "the call takes effect, its answer breaks off in the middle of the JSON"
    CUT = "the connection is reset before the call arrives"
    FROZEN = "no answer comes, and the call has no effect"
    CONFLICT = "409"
    BROKEN = "500"
    BUSY = "429 with Retry-After"
    FORBIDDEN = "403"
    OVERTAKEN = "somebody changes the job just before the call arrives"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changes something; `index` counts those of its namespace."""

    namespace: str
    index: int
    method: str
    path: str

    @property
    def kind(self) -> str:
        """Method and resource, without names."""
        parts = self.path.split("/namespaces/", 1)[1].split("/")[1:]
        return " ".join([self.method, "/".join(parts[::2])])


def refusal(code: int, reason: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": "by the proxy",
    }
    return web.json_response(body, status=code, headers={"Retry-After": "1"} if code == 429 else None)


ANSWERS = {
    Fault.CONFLICT: (409, "Conflict"),
    Fault.BROKEN: (500, "InternalError"),
    Fault.BUSY: (429, "TooManyRequests"),
    Fault.FORBIDDEN: (403, "Forbidden"),
}


def _changes_something(request: web.Request) -> bool:
    """Whether it is a call on behalf of a job that changes something."""
    return request.method != "GET" and "/leases" not in request.path and "/events" not in request.path


def _namespace(request: web.Request) -> str:
    return request.path.split("/namespaces/", 1)[1].split("/")[0]


@dataclass(eq=False)
class FaultProxy:
    """Serves plain HTTP on loopback; `kubeconfig` is for an operator that is to be behind it.

    Cut: `Fault.CUT`, `Fault.HALF`, `Fault.LOST`, `hang_up`. Freeze: `Fault.FROZEN`, `freeze`. Delay: `hold`. Duplicate,
    drop and reorder: `rearrange`.
    """

    login: Login
    folder: Path
    fault: Callable[[Call], Fault] = lambda call: Fault.PASS
    read_fault: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
    freeze: Callable[[web.Request], bool] = lambda request: False
    """Whether what an answer still has to say, such as the events of a watch, is held back."""
    hold: asyncio.Event | None = None
    """If set, calls that change something are passed on only after this event, however long their sender waits."""
    rearrange: Callable[[list[bytes]], list[bytes]] | None = None
    """What becomes of the events of a watch that arrive within `WINDOW_SECONDS` of each other, one a line."""
    watch_seconds: float | None = None
    """If set, after how many seconds the API server ends a watch, whatever the operator asks for."""
    kill: Callable[[], Awaitable[None]] | None = None
    terminate: Callable[[], None] | None = None
    overtake: Callable[[], Awaitable[object]] | None = None
    calls: dict[str, list[Call]] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    """By namespace, how many of them the API server has answered."""
    token: str | None = None
    """If set, the only bearer token that is let through."""
    _streams: set[asyncio.Transport] = field(default_factory=set)
    _deliveries: set[asyncio.Task[web.StreamResponse]] = field(default_factory=set)
    _runner: web.AppRunner | None = None
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FaultProxy:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=self.login.tls or True))
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    @property
    def kubeconfig(self) -> Path:
        assert self._runner is not None
        port = self._runner.addresses[0][1]
        user = {"tokenFile": str(self.folder / "token")} if self.token else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "operator", "user": user}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "operator"}}],
            "current-context": "proxy",
        }
        file = self.folder / f"proxy-{port}.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return refusal(401, "Unauthorized")
        if not _changes_something(request):
            answer = await self.read_fault(request) if self.read_fault is not None else None
            return answer or await self._forward(request)
        namespace = _namespace(request)
        earlier = self.calls.setdefault(namespace, [])
        call = Call(namespace, len(earlier), request.method, request.path)
        earlier.append(call)
        if self.hold is not None:
            return await self._forward_later(request, self.hold)
        match self.fault(call):
            case Fault.KILL_BEFORE:
                await self._kill()
                return refusal(503, "Killed")
            case Fault.KILL_AFTER:
                answer = await self._forward(request)
                await self._kill()
                return answer
            case Fault.TERM:
                assert self.terminate is not None
                self.terminate()
                return await self._forward(request)
            case Fault.LOST:
                await self._forward(request, silently=True)
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case Fault.HALF:
                return await self._forward(request, half=True)
            case Fault.CUT:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case Fault.FROZEN:
                await asyncio.Event().wait()
                raise AssertionError
            case Fault.OVERTAKEN:
                assert self.overtake is not None
                await self.overtake()
                return await self._forward(request)
            case Fault.PASS:
                return await self._forward(request)
            case other:
                return refusal(*ANSWERS[other])

    def hang_up(self) -> None:
        """Break every connection on which something is being read, such as a watch."""
        for transport in list(self._streams):
            transport.abort()

    async def _kill(self) -> None:
        assert self.kill is not None
        await self.kill()

    async def _forward_later(self, request: web.Request, event: asyncio.Event) -> web.StreamResponse:
        """Also where the sender has gone meanwhile: a packet that is on its way does not know."""
        await request.read()

        async def deliver() -> web.StreamResponse:
            await event.wait()
            return await self._forward(request, silently=True)

        delivery = asyncio.create_task(deliver())
        self._deliveries.add(delivery)
        return await asyncio.shield(delivery)

    async def delivered(self) -> None:
        """Wait until all calls that were held have been answered by the API server."""
        await asyncio.gather(*self._deliveries, return_exceptions=True)

    async def _forward(self, request: web.Request, *, silently: bool = False, half: bool = False) -> web.StreamResponse:
        assert self._session is not None
        kept = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        kept |= {"Authorization": self.login.headers["Authorization"]}
        url = self.login.server + request.path_qs
        if self.watch_seconds is not None:
            url = re.sub(r"\btimeoutSeconds=\d+", f"timeoutSeconds={self.watch_seconds:g}", url)
        async with self._session.request(
            request.method,
            url,
            data=await request.read() or None,
            headers=kept,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            if silently:
                await answer.read()
                self._count(request)
                return web.Response(status=answer.status)
            if half:
                text = await answer.read()
                self._count(request)
                return web.Response(body=text[: len(text) // 2], status=answer.status, headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            transport = request.transport
            if transport is not None:
                self._streams.add(transport)
            try:
                await response.prepare(request)
                watched = request.query.get("watch") == "true"
                chunks = self._rearranged(answer) if watched and self.rearrange else answer.content.iter_any()
                async for chunk in chunks:
                    while self.freeze(request):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    await response.write(chunk)
                while self.freeze(request):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                self._count(request)
                await response.write_eof()
            except (aiohttp.ClientConnectionError, ConnectionResetError, asyncio.CancelledError):
                pass  # the operator is gone, or the test has ended
            finally:
                if transport is not None:
                    self._streams.discard(transport)
            return response

    def _count(self, request: web.Request) -> None:
        if _changes_something(request):
            self.passed[_namespace(request)] += 1

    async def _rearranged(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The lines of a watch, as `rearrange` orders those of each window."""
        assert self.rearrange is not None
        lines: asyncio.Queue[bytes] = asyncio.Queue()

        async def read() -> None:
            async for line in answer.content:
                lines.put_nowait(line)
            lines.put_nowait(b"")

        reader = asyncio.create_task(read())
        try:
            window = [b"-"]
            while window[-1:] != [b""]:
                window = [await lines.get()]
                await asyncio.sleep(WINDOW_SECONDS)
                while not lines.empty():
                    window.append(lines.get_nowait())
                events = [line for line in window if line]
                if events:
                    yield b"".join(self.rearrange(events))
        finally:
            reader.cancel()
