"""What an answer of the API server says: a document, an error in its own words, or when to come back.

It may also be half a document, or the page of a proxy that stands before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from ddpjob_operator.runtime.decode import decode, decode_aside
from ddpjob_operator.runtime.errors import ApiError

_TOO_MANY = 429
LEAST_WAIT_SECONDS = 0.5
"""A busy server that says 0, or a time that has passed by our clock, is not asked again at once."""


async def decoded(
    payload: bytes, call: str, decoder: Callable[[bytes], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The document that answers a `call`; decoded whole where `decoder` raises ValueError.

    Raises:
        ApiError: it is not JSON.
    """
    if decoder is not None:
        with suppress(ValueError):
            return decoder(payload)
    try:
        answer: dict[str, Any] = await decode_aside(payload)
    except ValueError as error:
        raise ApiError(0, "BadAnswer", f"{call}: the answer is not JSON: {error}") from error
    return answer


def error_of(status: int, phrase: str, payload: bytes) -> ApiError:
    """What an answer with an error's status means."""
    try:
        body = decode(payload)
        return ApiError(status, body.get("reason") or phrase, body.get("message") or phrase, body.get("details"))
    except (ValueError, AttributeError):
        # a proxy's page, or half an answer: enough of it to recognise, not enough to flood a log
        return ApiError(status, phrase or "Unknown", " ".join(payload[:200].decode(errors="replace").split()))


def refusal(response: aiohttp.ClientResponse, payload: bytes) -> ApiError:
    """What an answer with an error's status means; a `Wait` where the server says when to come back."""
    error = error_of(response.status, response.reason or "", payload)
    if response.status == _TOO_MANY and (after := response.headers.get("Retry-After")):
        return Wait(retry_after_seconds(after, datetime.now(UTC)), error)
    return error


class Wait(ApiError):
    """The server asked to come back later."""

    def __init__(self, seconds: float, error: ApiError) -> None:
        super().__init__(error.status, error.reason, error.message, error.details)
        self.seconds = seconds


def retry_after_seconds(value: str, now: datetime) -> float:
    """Seconds to wait for a Retry-After header, which is a number or an HTTP date (RFC 9110 section 10.2.3); at least
    LEAST_WAIT_SECONDS.

    Unreadable: 1 s.
    """
    try:
        return max(LEAST_WAIT_SECONDS, float(int(value)))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 1.0
    return max(LEAST_WAIT_SECONDS, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())
