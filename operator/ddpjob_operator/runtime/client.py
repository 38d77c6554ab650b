"""JSON over HTTP to the API server: plain dicts in and out.

On top of one aiohttp session this adds what a controller needs: a limit on calls in flight that namespaces share
fairly, a deadline, a wait where the server asks for one (429), one new login after a 401, and errors that carry
the server's own reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from ddpjob_operator import metrics
from ddpjob_operator.runtime.answers import Wait, decoded, error_of, refusal
from ddpjob_operator.runtime.decode import decode
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import OPERATOR, Login, log_in, open_session
from ddpjob_operator.runtime.paths import namespace_of
from ddpjob_operator.runtime.shares import FairSemaphore
from ddpjob_operator.runtime.turns import OneATurn

logger = logging.getLogger(__name__)

Json = dict[str, Any]

REQUEST_SECONDS = 15.0
WRITE_SECONDS = 35.0
"""Of a call that changes something. An admission webhook may take 30 s before it counts as failed, also where that is
ignored; the API server itself gives the call up after 34 s, and says so.
"""
LONGEST_WAIT_SECONDS = 60.0
"""The most that a Retry-After is obeyed for within one call; after it the caller's own backoff takes over."""

_WATCH_CHUNK = 2**16
_HALF_A_LINE = 2**21
_UNAUTHORIZED = 401
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Accept header: of an object, its metadata alone."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

WATCH_SECONDS = 300
"""How long one watch request lasts before the server ends it."""
SILENCE_SECONDS = 70.0
"""A watch without bookmarks, of which the server sends one a minute, may have lost its connection. Of a kind in which
nothing has changed since the watch began, servers send none.
"""

PAGE = 100
"""Objects in one page of a list: pods have 10 kB of JSON and more, and take several times that while they are decoded,
which holds up the event loop.
"""


class Page(NamedTuple):
    """Some objects of a collection, and the resourceVersion at which the whole list is true."""

    items: list[Json]
    version: int
    first: bool
    """Whether it begins the list: what came before it is void."""


class Client:
    """Calls to one API server. Create it inside a running loop with `connect()`, close it at the end."""

    def __init__(self, current: Login, in_flight: int, context: str | None = None, agent: str = OPERATOR) -> None:
        self.fence: Callable[[], None] | None = None
        """Called before every call that changes anything; what it raises prevents the call (`leader`)."""
        self._login = current
        self._context = context
        self._agent = agent
        self._in_flight = FairSemaphore(in_flight)
        self._turns = OneATurn()
        self._logging_in = asyncio.Lock()
        self._session = open_session(current)
        self._calls: Counter[aiohttp.ClientSession] = Counter()
        """How many are in progress."""

    @property
    def namespace(self) -> str:
        """The namespace that the configuration names, for a caller who names none."""
        return self._login.namespace

    async def close(self) -> None:
        for session in {self._session, *self._calls}:
            await session.close()

    async def get(self, path: str, resource: str) -> Json:
        return await self._call("GET", path, resource)

    async def get_metadata(self, path: str, resource: str) -> Json:
        """An object without its content, which may be large."""
        return await self._call("GET", path, resource, headers={"Accept": METADATA})

    async def create(self, path: str, resource: str, body: Json, *, dry_run: bool = False) -> Json:
        """With `dry_run` the server does all but store it, and answers as if it had."""
        return await self._call("POST", path, resource, body=body, query={"dryRun": "All"} if dry_run else None)

    async def merge_patch(self, path: str, resource: str, body: Json) -> Json:
        return await self._call("PATCH", path, resource, body=body, headers={"Content-Type": MERGE_PATCH})

    async def strategic_merge_patch(self, path: str, resource: str, body: Json) -> Json:
        """For Kubernetes' own types only: lists such as ownerReferences are merged by their key."""
        return await self._call("PATCH", path, resource, body=body, headers={"Content-Type": STRATEGIC_MERGE_PATCH})

    async def json_patch(self, path: str, resource: str, operations: Sequence[Json]) -> Json:
        """RFC 6902. Where one of its tests fails nothing is changed, and the server answers 422."""
        return await self._call("PATCH", path, resource, body=operations, headers={"Content-Type": JSON_PATCH})

    async def delete(self, path: str, resource: str, body: Json | None = None) -> Json:
        return await self._call("DELETE", path, resource, body=body)

    async def read(self, path: str, resource: str, **query: str) -> bytes:
        """What is at `path` as it stands: a log is no JSON."""
        return await self._answer("GET", path, resource, query=query)

    async def server_time(self) -> datetime | None:
        """The API server's clock, to the second; None where its answer has no Date.

        Raises:
            ApiError: it does not answer.
        """
        try:
            async with self._send("GET", "/version", {}, None, None, REQUEST_SECONDS) as response:
                date = response.headers.get("Date")
        except TimeoutError:
            raise ApiError(0, "Timeout", f"GET /version: no answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "ConnectionFailed", f"GET /version: {error}") from error
        try:
            return parsedate_to_datetime(date) if date else None
        except ValueError:
            return None

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """The lines of a text as they come, such as a log that is followed: without a deadline. Of a line that is very
        long, as a progress bar may be, the middle is left out.

        Raises:
            ApiError: the server refused, or the connection broke.
        """
        try:
            async with self._send("GET", path, query, None, None, None) as response:
                if response.status >= 400:
                    raise error_of(response.status, response.reason or "", await response.read())
                line = _Line()
                async for block in response.content.iter_any():
                    *ends, begins = block.split(b"\n")
                    for end in ends:
                        line.add(end)
                        yield line.text()
                        line = _Line()
                    line.add(begins)
                if last := line.text():
                    yield last
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "ConnectionFailed", f"GET {path}: {error}") from error

    async def bounded(self, path: str, most: int, seconds: float) -> bytes:
        """What is at `path`, of at most so many bytes, within so many seconds: a pod answers, and may send anything.

        Raises:
            ApiError: the server refused, the connection broke, or it took too long.
        """
        try:
            async with self._send("GET", path, {}, None, None, seconds) as response:
                payload = b""
                while len(payload) < most and (more := await response.content.read(most - len(payload))):
                    payload += more
                if response.status >= 400:
                    raise error_of(response.status, response.reason or "", payload)
                return payload
        except TimeoutError:
            raise ApiError(0, "Timeout", f"GET {path}: no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "ConnectionFailed", f"GET {path}: {error}") from error

    @asynccontextmanager
    async def socket(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A websocket, opened once more after a 401 with fresh credentials. What it brings waits in the buffers of the
        kernel until it is read.

        Raises:
            ApiError: the server refused, the connection broke, or was silent for longer than a watch may be.
        """
        used = self._login
        async with AsyncExitStack() as stack:
            try:
                opened = await stack.enter_async_context(self._socket(path, query, protocol))
            except ApiError as error:
                if error.status != _UNAUTHORIZED:
                    raise
                await self._login_again(used)
                opened = await stack.enter_async_context(self._socket(path, query, protocol))
            yield opened

    @asynccontextmanager
    async def _socket(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        try:
            async with (
                self._current_session() as session,
                session.ws_connect(
                    self._login.server + path,
                    params=query,
                    protocols=(protocol,),
                    headers={"Accept": "*/*"},  # what such a path produces: of application/json alone, it says 406
                    timeout=aiohttp.ClientWSTimeout(ws_receive=SILENCE_SECONDS, ws_close=1.0),
                    server_hostname=self._login.server_name,
                ) as socket,
            ):
                yield socket
        except aiohttp.WSServerHandshakeError as error:  # aiohttp keeps the status of a refusal, not its words
            raise ApiError(error.status, error.message, f"GET {path}: the server refused: {error.status}") from error
        except TimeoutError:
            raise ApiError(0, "ConnectionFailed", f"GET {path}: silent for {SILENCE_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "ConnectionFailed", f"GET {path}: {error}") from error

    async def watch(self, path: str, version: int, *, accept: str = "", **query: str) -> AsyncIterator[Json]:
        """Changes of a collection since `version`, bookmarks among them, until the server ends the request, which it
        does in time, or has been silent for long.

        Raises:
            ApiError: the server refused, or the connection broke. Status 410: it no longer knows that version.
        """
        asked = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": str(version)}
        asked |= {**query, "timeoutSeconds": str(WATCH_SECONDS)}
        headers = {"Accept": accept} if accept else None
        # the watches of many namespaces that began together must not begin anew together
        silence = SILENCE_SECONDS * random.uniform(1.0, 1.5)  # noqa: S311 - jitter, not a secret
        longest = aiohttp.ClientTimeout(total=WATCH_SECONDS + 30.0, sock_connect=REQUEST_SECONDS, sock_read=silence)
        try:
            async with self._send("GET", path, asked, None, headers, longest) as response:
                if response.status >= 400:
                    raise error_of(response.status, response.reason or "", await response.read())
                with suppress(aiohttp.SocketTimeoutError):
                    async for line in response.content.iter_chunked(_WATCH_CHUNK):
                        event: Json = decode(line)
                        if event["type"] == "ERROR":
                            said = event["object"]
                            raise ApiError(said.get("code") or 0, said.get("reason") or "", said.get("message") or "")
                        yield event
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(0, "ConnectionFailed", f"GET {path}: the watch broke: {error}") from error

    async def list(self, path: str, resource: str, page: int = PAGE, **query: str) -> tuple[list[Json], int]:
        """All objects of a collection and the resourceVersion at which the list was true."""
        items: list[Json] = []
        version = 0
        async for found in self.pages(path, resource, page, **query):
            items = found.items if found.first else items + found.items
            version = found.version
        return items, version

    async def pages(
        self,
        path: str,
        resource: str,
        page: int = PAGE,
        decoder: Callable[[bytes], Json] | None = None,
        /,
        *,
        accept: str = "",
        **query: str,
    ) -> AsyncIterator[Page]:
        """A collection page by page, so that a large one is never in memory as a whole; the next page is on its way
        while one is taken in. A list that expires midway starts over, with another first page.

        `decoder` makes of a page what is read of it; a page for which it raises ValueError is decoded whole.
        """
        headers = {"Accept": accept} if accept else None

        def ask(token: str) -> asyncio.Task[bytes]:
            asked = {**query, "limit": str(page)} | ({"continue": token} if token else {})
            answer = self._answer("GET", path, resource, query=asked, headers=headers, verb="LIST")
            return asyncio.create_task(answer, name=f"page of {resource}")

        for _ in range(3):
            on_its_way, first = ask(""), True
            try:
                while True:
                    answer = await decoded(await on_its_way, f"GET {path}", decoder)
                    metadata = answer["metadata"]
                    token = metadata.get("continue") or ""
                    if token:  # the server makes the next page while this one is taken in
                        on_its_way = ask(token)
                    yield Page(answer.pop("items", None) or [], int(metadata["resourceVersion"]), first)
                    first = False
                    if not token:
                        return
            except ApiError as error:
                if error.status != 410:
                    raise
            finally:
                on_its_way.cancel()
                del on_its_way  # it has the error that came through here
        raise ApiError(410, "Expired", f"the list of {resource} expired three times before its last page was read")

    async def _call(self, method: str, path: str, resource: str, **options: Any) -> Json:
        return await decoded(await self._answer(method, path, resource, **options), f"{method} {path}")

    async def _answer(
        self,
        method: str,
        path: str,
        resource: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | Sequence[Json] | None = None,
        headers: Mapping[str, str] | None = None,
        verb: str | None = None,
    ) -> bytes:
        """One call, once more after a 401 with fresh credentials, and again for as long as the server asks to wait
        (429)."""
        deadline = asyncio.get_running_loop().time() + LONGEST_WAIT_SECONDS
        fresh = False
        while True:
            used = self._login
            try:
                async with self._in_flight.place(namespace_of(path)):
                    await self._turns.wait()
                    if self.fence is not None and method != "GET":
                        self.fence()
                    return await self._once(method, path, resource, query or {}, body, headers, verb or method)
            except Wait as wait:
                if asyncio.get_running_loop().time() + wait.seconds > deadline:
                    raise
                await asyncio.sleep(wait.seconds)  # outside the semaphore: others may still be served
            except ApiError as error:
                if error.status != _UNAUTHORIZED or fresh or error.denied:
                    raise
                fresh = True
                await self._login_again(used)

    async def _once(
        self,
        method: str,
        path: str,
        resource: str,
        query: Mapping[str, str],
        body: Json | Sequence[Json] | None,
        headers: Mapping[str, str] | None,
        verb: str,
    ) -> bytes:
        code, limit = "0", REQUEST_SECONDS if method == "GET" else WRITE_SECONDS
        try:
            async with self._send(method, path, query, body, headers, limit) as response:
                code = str(response.status)
                payload = await response.read()
                if response.status >= 400:
                    raise refusal(response, payload)
                return payload
        except TimeoutError:
            raise ApiError(0, "Timeout", f"{method} {path}: no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "ConnectionFailed", f"{method} {path}: {error}") from error
        finally:
            metrics.API_REQUESTS.labels(verb=verb, resource=resource, code=code).inc()

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | Sequence[Json] | None,
        headers: Mapping[str, str] | None,
        limit: aiohttp.ClientTimeout | float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            self._current_session() as session,
            session.request(
                method,
                self._login.server + path,
                params=query,
                data=None if body is None else _dumps(body),
                headers=headers or (None if body is None else {"Content-Type": "application/json"}),
                timeout=limit if isinstance(limit, aiohttp.ClientTimeout) else aiohttp.ClientTimeout(total=limit),
                server_hostname=self._login.server_name,
                allow_redirects=False,
            ) as response,
        ):
            yield response

    @asynccontextmanager
    async def _current_session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """It stays open until the end of the block: a watch, or a log that is followed, was let in and goes on when
        others have to log in again."""
        session = self._session
        self._calls[session] += 1
        try:
            yield session
        finally:
            self._calls[session] -= 1
            await self._close_unused(session)

    async def _close_unused(self, session: aiohttp.ClientSession) -> None:
        if not self._calls[session]:
            del self._calls[session]
            if session is not self._session:
                await session.close()

    async def _login_again(self, used: Login) -> None:
        """Read token files and exec plugins again, once for all calls that were refused with the same credentials."""
        async with self._logging_in:
            if self._login is not used:
                return
            logger.info("the API server refused our credentials; reading the configuration again")
            current, old = await log_in(self._context, self._agent), self._session
            self._session, self._login = open_session(current), current
            await self._close_unused(old)


async def connect(in_flight: int = 64, context: str | None = None, agent: str = OPERATOR) -> Client:
    """A client for the configured API server, or for that of a `context` of the kubeconfig."""
    return Client(await log_in(context, agent), in_flight, context, agent)


@dataclass(slots=True)
class _Line:
    """A line that comes in pieces, in time and memory that do not grow with the square of its length."""

    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> None:
        room = _HALF_A_LINE - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 2 * _HALF_A_LINE:
            del self._tail[:-_HALF_A_LINE]

    def text(self) -> str:
        return (self._head + self._tail[-_HALF_A_LINE:]).decode(errors="replace")


def _dumps(value: object) -> str:
    """NaN is no JSON: better an error here than a 400 that does not say where."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
