"""JSON of the API server, with a bound on how deeply it may be nested.

The author of an object decides how deep it is: up to the API server's own limit of 10,000 levels, where a field
has no schema. Python's decoder and everything recursive after it raise RecursionError long before, and one such object
in a list would hide all others. So what is nested deeper than `LEVELS` is left out, and the rest is decoded.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
from pydantic_core import from_json

from ddpjob_operator import metrics
from ddpjob_operator.runtime.errors import without_frames

logger = logging.getLogger(__name__)

LEVELS = 100
"""A pod has about 15 levels, and its managed fields as many again."""

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A bracket or a string, which may be without an end: else each of its quotes would be tried as the start of one."""
_OPENING = b"[{"
_CLOSING = b"]}"


def decode(payload: bytes) -> Any:
    """A JSON document, without what is nested too deeply in it.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return from_json(payload)
    except ValueError as error:
        if not _is_too_deep(error):
            raise
    return from_json(cut(payload))


async def decode_aside(payload: bytes) -> Any:
    """As `decode`, but a document that has to be cut does not hold up the event loop."""
    try:
        return from_json(payload)
    except ValueError as error:
        if not _is_too_deep(error):
            raise
    return from_json(await asyncio.to_thread(cut, payload))


def _is_too_deep(error: ValueError) -> bool:
    """pydantic's decoder takes 200 levels, whatever Python's recursion limit is."""
    return "recursion limit" in str(error)


def cut(payload: bytes, levels: int = LEVELS) -> bytes:
    """`payload` with null in the place of each object or list below that many levels."""
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(payload):
        first = payload[token.start()]
        if first in _OPENING:
            depth += 1
            if depth == levels + 1:
                kept += (payload[start : token.start()], b"null")
        elif first in _CLOSING:
            if depth == levels + 1:
                start = token.end()
            depth -= 1
    if kept:
        metrics.CUT_ANSWERS.inc()
        logger.warning("an object of the API server has more than %d levels; what is below them is left out", levels)
    kept.append(b"" if depth > levels else payload[start:])
    return b"".join(kept)


_CLOSED: Final = "Connection closed."
"""What aiohttp says where a stream is read whose session was closed. kopf closes that of all its watches once one of
them is refused with 401."""


class ShallowResponse(aiohttp.ClientResponse):
    """A response whose JSON, and each line of whose stream, is cut before a library decodes it."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        self.content = _ShallowStream(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        """
        Raises:
            json.JSONDecodeError: it is not JSON. Libraries catch this of an error page, which a proxy or a server that
                does not serve the path sends, and no other ValueError: a watch of kopf ends for good with that.
        """
        try:
            return await decode_aside(await self.read())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None

    async def text(self, encoding: str | None = None, errors: str = "replace") -> str:
        """A page in another encoding than it says is still an error, and no exception of its own."""
        return await super().text(encoding, errors)


class _ShallowStream:
    """A stream of one JSON document a line; the other ways to read it are those of the stream itself."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, between which others go on: a chunk may have a dozen events, which kopf decodes at once.

        Raises:
            aiohttp.ClientError: a copy of what ended the stream. The stream keeps its error, and an error that came
                through here would keep the stream: a cycle, and one that is older than most collections, since watches
                last for minutes (`runtime.garbage`).
        """
        line: list[bytes] = []
        try:
            async for chunk in self._stream.iter_chunked(size):
                *ended, rest = chunk.split(b"\n")
                for part in ended:
                    yield await _shallow(b"".join((*line, part))) + b"\n"
                    line.clear()
                    await asyncio.sleep(0)
                line.append(rest)
        except aiohttp.ClientError as error:
            without_frames(error)
            raise copy.copy(error) from error.__cause__
        except RuntimeError as error:
            if str(error) != _CLOSED:
                raise
            raise aiohttp.ClientConnectionError(_CLOSED) from None  # kopf goes on after this one alone
        if last := b"".join(line):
            yield await _shallow(last)


async def _shallow(line: bytes) -> bytes:
    if line.count(b"{") + line.count(b"[") <= LEVELS:
        return line
    try:
        from_json(line)
    except ValueError as error:
        if _is_too_deep(error):
            return await asyncio.to_thread(cut, line)
    return line
