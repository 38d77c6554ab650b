"""Posts JSON documents to one URL, in the background: the caller does not wait.

The URL may contain a secret, as the webhooks of chat systems do. Neither it nor the text of an exception, which may
quote it, is logged. HTTPS_PROXY and NO_PROXY count, but not for a Service: receivers are often outside of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from ddpjob_operator import metrics
from ddpjob_operator.runtime.proxy import proxy_of_environment

logger = logging.getLogger(__name__)

AT_ONCE = 4
WAITING = 1024
TIMEOUT_SECONDS = 10.0
TRIES = 5
_FIRST_PAUSE = 2.0
_FACTOR = 4.0

OnDone = Callable[[bool], None]
"""Takes whether a document was delivered."""


@dataclass(eq=False)
class Webhook:
    """One receiver. A document is offered under a key, and again as often as one likes while it is on its way."""

    url: str = field(repr=False)
    token: str = field(default="", repr=False)
    """Sent as a bearer token. Empty: none."""
    content_type: str = "application/json"
    pause: Callable[[int], float] = lambda tried: pause_seconds(tried, random.random())  # noqa: S311
    """Seconds to wait after so many tries."""
    _sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _session: aiohttp.ClientSession | None = None

    def offer(self, key: str, body: Callable[[], bytes], done: OnDone) -> bool:
        """Send what `body` returns, unless a document with this key is on its way.

        Returns:
            False if too many others are; it is to be offered again later.
        """
        if key in self._sending:
            return True
        if len(self._sending) >= WAITING:
            return False
        self._sending[key] = asyncio.create_task(self._deliver(key, body(), done), name=f"webhook {key}")
        return True

    def drop_all(self) -> None:
        """Stop sending. What was not delivered is not reported as done."""
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()

    async def close(self) -> None:
        tasks = list(self._sending.values())
        self.drop_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _deliver(self, key: str, body: bytes, done: OnDone) -> None:
        problem = ""
        for tried in range(1, TRIES + 1):
            async with self._at_once:
                problem, may_pass = await self._post(body)
            if not problem or not may_pass or tried == TRIES:
                break
            logger.debug("webhook: %s was not delivered: %s; try %d of %d", key, problem, tried, TRIES)
            await asyncio.sleep(self.pause(tried))
        metrics.NOTIFICATIONS.labels(result="failed" if problem else "delivered").inc()
        if problem:
            logger.warning("webhook: %s was not delivered, and is not sent again: %s", key, problem)
        self._sending.pop(key, None)
        done(not problem)

    async def _post(self, body: bytes) -> tuple[str, bool]:
        """Why the document was not accepted (empty: it was), and whether that may pass. The answer is not read."""
        headers = {"Content-Type": self.content_type}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            async with self._connected().post(
                self.url, data=body, headers=headers, proxy=proxy_to(self.url), allow_redirects=False
            ) as answer:
                status = answer.status
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s", True
        except (aiohttp.ClientError, OSError) as error:
            return f"no connection ({type(error).__name__})", True
        except Exception as error:  # a document that cannot be sent must not end the operator
            return type(error).__name__, False
        return problem_of(status), status == 429 or status >= 500

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def proxy_to(url: str) -> str | None:
    """That of the environment; None to a Service that is named as such, which a proxy outside of the cluster does not
    know: `name`, `name.namespace.svc` and what may follow.
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    is_service = not {".", ":"} & {*host} or host.split(".")[2:3] == ["svc"]
    return None if is_service else proxy_of_environment(url, os.environ)


def problem_of(status: int) -> str:
    """Why an answer with this status is no acceptance; empty if it is one."""
    if 200 <= status < 300:
        return ""
    return f"HTTP {status}, and redirects are not followed" if 300 <= status < 400 else f"HTTP {status}"


def pause_seconds(tried: int, chance: float) -> float:
    """Seconds until the next try: from 2 s, four times as long after each, and by `chance` (0 to 1) half of that to
    one and a half times, so that receivers which come back do not get everything at once."""
    return float(_FIRST_PAUSE * _FACTOR ** (tried - 1) * (0.5 + chance))
