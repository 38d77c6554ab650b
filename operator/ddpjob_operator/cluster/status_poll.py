"""Asks node rank 0 of each running job for its progress, over HTTP (docs/contracts.md section 4).

A trainer that does not answer is no failure: it may be starting, busy or behind a policy. It is counted and asked
again. What comes back is from a user's container, so its size is bounded.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from ddpjob_operator import metrics
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status
from ddpjob_operator.runtime.shares import FairSemaphore
from ddpjob_operator.runtime.turns import OneATurn

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
_LARGEST = 256 * 1024
_AT_ONCE = 64
_A_SECOND = 50.0
"""Questions to all trainers together: each answer costs a look at its job."""
_UNANSWERED = 2
"""Questions in a row. One may have met a restart of the network, or an answer that was late."""
_FREE_TRIES = 10
_LONGEST_PAUSE = 30.0


class Target(NamedTuple):
    """A trainer to ask: where, and for which attempt of which job it must answer."""

    host: str
    uid: str
    attempt: int
    otherwise: str = ""
    """The host of another trainer of that attempt, which is asked as long as the first one does not train."""


OnReport = Callable[[Any, Target, TrainerReport], None]
"""Takes an answer, with the key that its trainer is watched under."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A trainer that is asked, and what it has left unanswered since its last answer."""

    target: Target
    task: asyncio.Task[None] | None = None
    unanswered: int = 0
    since: float = 0.0
    """When the first of these questions was asked, by the event loop's clock."""


@dataclass(eq=False)
class StatusPoller:
    """Requests the status of one trainer for each key, again and again."""

    every: float = 2.0
    port: int = STATUS_PORT
    _asking: dict[Any, _Asked] = field(default_factory=dict)
    _session: aiohttp.ClientSession | None = None
    _at_once: FairSemaphore = field(default_factory=lambda: FairSemaphore(_AT_ONCE))
    _turns: OneATurn = field(default_factory=OneATurn)

    def watch(self, key: Any, target: Target, on_report: OnReport) -> None:
        """Ask `target` from now on, instead of any other that was asked under this key, and hand on its answers."""
        if (asked := self._asking.get(key)) is not None and asked.target == target:
            return
        self.drop(key)
        asked = self._asking[key] = _Asked(target)
        # without the context of the pass that asks for it: the task outlives that
        asked.task = asyncio.create_task(
            self._keep_asking(key, asked, on_report), name=f"status of {key}", context=contextvars.Context()
        )

    def drop(self, key: Any) -> None:
        """Stop asking under this key."""
        if (asked := self._asking.pop(key, None)) is not None and asked.task is not None:
            asked.task.cancel()

    def silent_seconds(self, key: Any) -> float:
        """For how long the trainer that is asked under this key has not answered; 0 while one question alone is
        unanswered. How old its last answer is says nothing of it: one of many trainers is seldom asked.
        """
        asked = self._asking.get(key)
        if asked is None or asked.unanswered < _UNANSWERED:
            return 0.0
        return asyncio.get_running_loop().time() - asked.since

    def drop_all(self) -> None:
        """Stop asking."""
        for key in list(self._asking):
            self.drop(key)

    async def close(self) -> None:
        self.drop_all()
        if self._session is not None:
            await self._session.close()

    async def _keep_asking(self, key: Any, asked: _Asked, on_report: OnReport) -> None:
        share = getattr(key, "namespace", None)
        while True:
            async with self._at_once.place(share):
                await self._turns.wait()
                if asked.unanswered == 0:
                    asked.since = asyncio.get_running_loop().time()
                report = await self._report(asked.target)
            asked.unanswered = 0 if report is not None else asked.unanswered + 1
            if report is not None:
                on_report(key, asked.target, report)
            await asyncio.sleep(pause_seconds(self.every, asked.unanswered, len(self._asking)))

    async def _report(self, target: Target) -> TrainerReport | None:
        report = await self._ask(target)
        if target.otherwise and (report is None or report.step is None):
            report = await self._ask(target._replace(host=target.otherwise)) or report
        return report

    async def _ask(self, target: Target) -> TrainerReport | None:
        if self._session is None:
            # cookies of one trainer are none of the next one's business
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), cookie_jar=aiohttp.DummyCookieJar()
            )
        host = f"[{target.host}]" if ":" in target.host else target.host
        result = "failed"
        try:
            async with self._session.get(f"http://{host}:{self.port}/status", allow_redirects=False) as response:
                body = await response.content.read(_LARGEST + 1)
                while len(body) <= _LARGEST and (more := await response.content.read(_LARGEST + 1 - len(body))):
                    body += more
                report = read_answer(body, target) if response.status == 200 else None
                result = "answered" if report is not None else "refused"
                return report
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("no progress from %s: %s", target.host, error or type(error).__name__)
            return None
        finally:
            metrics.STATUS_POLLS.labels(result=result).inc()


def pause_seconds(every: float, silent: int, trainers: int) -> float:
    """Until the next question to one of so many trainers.

    It has left `silent` unanswered in a row: a few while it starts, then it is asked less and less often, since each
    may hold one of `_AT_ONCE` places until its timeout.
    """
    every = max(every, trainers / _A_SECOND)
    return max(every, min(_LONGEST_PAUSE, every * 2.0 ** min(silent - _FREE_TRIES, 30)))


def read_answer(body: bytes, target: Target) -> TrainerReport | None:
    """The answer; None if it is too long, not of the contract, or not `target`'s."""
    report = read_status(body) if len(body) <= _LARGEST else None
    return report if report is not None and report.is_of(target.uid, target.attempt) else None
