"""Asks node rank 0 of each running job for its progress, over HTTP (docs/contracts.md section 4).

A trainer that does not answer is no failure: it may be starting, busy or behind a policy. It is counted and asked
again. What comes back is from a user's container, so its size is bounded, its shape is checked, and only the fields
of the contract get through.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from ddpjob_operator import metrics

logger = logging.getLogger(__name__)

PORT = 9400
TIMEOUT_SECONDS = 2.0
_LARGEST = 256 * 1024
_AT_ONCE = 64
_NUMBERS = (
    *("phaseSeconds", "time", "startTime", "epoch", "step", "totalSteps", "samples", "loss", "samplesPerSecond"),
    *("etaSeconds", "resumedFromStep", "nodeRank", "worldSize"),
)

Report = dict[str, Any]


class Target(NamedTuple):
    """A trainer to ask: where, and for which attempt of which job it must answer."""

    host: str
    uid: str
    attempt: int


@dataclass(eq=False)
class StatusPoller:
    """Keeps one question going for each watched job; answers are handed to `heard` with the key they were watched
    under."""

    heard: Callable[[Any, Target, Report], None]
    every: float = 2.0
    port: int = PORT
    _asking: dict[Any, tuple[Target, asyncio.Task[None]]] = field(default_factory=dict)
    _session: aiohttp.ClientSession | None = None
    _at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    def watch(self, key: Any, target: Target) -> None:
        """Ask `target` from now on, instead of any other that was asked under this key."""
        if (asking := self._asking.get(key)) is not None:
            if asking[0] == target:
                return
            asking[1].cancel()
        self._asking[key] = (target, asyncio.create_task(self._keep_asking(key, target), name=f"status of {key}"))

    def drop(self, key: Any) -> None:
        """Ask nobody under this key any more."""
        if (asking := self._asking.pop(key, None)) is not None:
            asking[1].cancel()

    async def close(self) -> None:
        for key in list(self._asking):
            self.drop(key)
        if self._session is not None:
            await self._session.close()

    async def _keep_asking(self, key: Any, target: Target) -> None:
        while True:
            report = await self._ask(target)
            if report is not None:
                self.heard(key, target, report)
            await asyncio.sleep(self.every)

    async def _ask(self, target: Target) -> Report | None:
        if self._session is None:
            # cookies of one trainer are none of the next one's business
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), cookie_jar=aiohttp.DummyCookieJar()
            )
        host = f"[{target.host}]" if ":" in target.host else target.host
        result = "failed"
        try:
            async with (
                self._at_once,
                self._session.get(f"http://{host}:{self.port}/status", allow_redirects=False) as response,
            ):
                body = await response.content.read(_LARGEST + 1)
                while len(body) <= _LARGEST and (more := await response.content.read(_LARGEST + 1 - len(body))):
                    body += more
                report = checked_report(body, target) if response.status == 200 else None
                result = "answered" if report is not None else "refused"
                return report
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("no progress from %s: %s", target.host, error or type(error).__name__)
            return None
        finally:
            metrics.STATUS_POLLS.labels(result=result).inc()


def checked_report(body: bytes, target: Target) -> Report | None:
    """The answer, each field of the contract being None or of its type; None if it is not `target`'s answer.

    Numbers that are not finite (a loss that has diverged to NaN) become None: JSON has no word for them.
    """
    if len(body) > _LARGEST:
        return None
    try:
        answer = json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.get("version") != 1:
        return None
    if answer.get("uid") != target.uid or answer.get("attempt") != target.attempt:
        return None
    report: Report = {name: _number(answer.get(name)) for name in _NUMBERS}
    report |= {name: answer[name] for name in ("version", "uid", "attempt")}
    report["phase"] = phase if isinstance(phase := answer.get("phase"), str) and len(phase) <= 64 else None
    report["snapshot"] = _snapshot(answer.get("snapshot"))
    metrics_ = answer.get("metrics")
    report["metrics"] = (
        {str(name)[:64]: value for name, value in list(metrics_.items())[:64] if _number(value) is not None}
        if isinstance(metrics_, dict)
        else None
    )
    ranks = answer.get("ranks")
    report["ranks"] = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return report


def _snapshot(value: Any) -> Report | None:
    if not isinstance(value, dict) or _number(value.get("step")) is None or _number(value.get("time")) is None:
        return None
    return {"step": value["step"], "time": value["time"], "verified": value.get("verified") is True}


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    return value if math.isfinite(value) else None
