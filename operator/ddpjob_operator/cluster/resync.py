"""Lists everything from time to time: to learn what was there before, and what a lost watch did not announce.

A watch that starts over lists again, but kopf passes on only what exists. A pod that was deleted meanwhile would be
remembered for ever, and a restart never begin. So what our own lists lack is dropped, and every job is looked at
again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ddpjob_operator import metrics
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.cache import Cache, Key
from ddpjob_operator.cluster.client import Client
from ddpjob_operator.cluster.errors import ApiError
from ddpjob_operator.cluster.queue import Backoff
from ddpjob_operator.core import names

logger = logging.getLogger(__name__)

OUR_PODS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"


@dataclass(eq=False)
class Resync:
    """The periodic lists of the namespaces that are served (none named: all of them)."""

    client: Client
    cache: Cache
    namespaces: tuple[str, ...]
    every: float
    enqueue: Callable[[Iterable[Key]], None]
    first_done: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = False
    """Whether the last round of lists succeeded."""

    async def run(self) -> None:
        """List until cancelled; soon again after a failure."""
        failures, backoff = 0, Backoff(first=0.5, longest=min(30.0, self.every))
        while True:
            try:
                self.enqueue(await self.once())
            except ApiError as error:
                failures += 1
                self.healthy = False
                wait = backoff.seconds(failures, random.random())  # noqa: S311 - jitter, not a secret
                metrics.RESYNCS.labels(result="failed").inc()
                logger.warning("cannot list: %s; trying again in %.1f s", explain(error), wait)
            else:
                failures, self.healthy = 0, True
                metrics.RESYNCS.labels(result="done").inc()
                self.first_done.set()
                wait = self.every * random.uniform(0.9, 1.1)  # noqa: S311 - replicas must not list in step
            await asyncio.sleep(wait)

    async def once(self) -> set[Key]:
        """One round.

        Returns:
            the keys of all jobs that were known or are there.

        Raises:
            ApiError: a list failed; the cache keeps what it had of that namespace.
        """
        keys: set[Key] = set()
        oldest: list[int] = []
        for namespace in self.namespaces or (None,):
            (jobs, jobs_version), (pods, pods_version) = await asyncio.gather(
                self.client.list(paths.jobs(namespace), "ddpjobs"),
                self.client.list(paths.pods(namespace), "pods", labelSelector=OUR_PODS),
            )
            keys |= self.cache.take_lists(namespace, jobs, pods, jobs_version, pods_version)
            oldest += (jobs_version, pods_version)
        self.cache.expire(min(oldest))
        return keys


def explain(error: ApiError) -> str:
    """The error, with what to do about the ones that an administrator causes."""
    if error.not_found:
        return f"{error} (is the CRD ddpjobs.training.ddpjob.io installed?)"
    if error.status == 403:
        return f"{error} (does the operator's Role or ClusterRole allow it?)"
    return str(error)
