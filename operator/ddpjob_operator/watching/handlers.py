"""kopf registration: an event only says "look at that job again"; all decisions are elsewhere.

Event handlers (`on.event`) and nothing else: they keep no annotation and no finalizer on the objects, and what they
raise kopf would log and forget, so they do nothing that can fail.
"""

from __future__ import annotations

from typing import Any

import kopf

from ddpjob_operator import metrics
from ddpjob_operator.api import GROUP, PLURAL, VERSION
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.runtime.queue import WorkQueue
from ddpjob_operator.shards import Shard


def register(registry: kopf.OperatorRegistry, cache: Cache, queue: WorkQueue[Key], shard: Shard) -> None:
    """Feed `cache` and `queue` from the watches of DDPJobs and of their pods, as far as they are the shard's."""

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_seen(event: Any, **_: Any) -> None:
        metrics.WATCH_EVENTS.labels(resource="ddpjobs").inc()
        job = event["object"]
        if not shard.has(job["metadata"]["namespace"]):
            return
        if cache.drop_job(job) if event["type"] == "DELETED" else cache.put_job(job):
            queue.add(Key(job["metadata"]["namespace"], job["metadata"]["name"]))

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod_seen(event: Any, **_: Any) -> None:
        metrics.WATCH_EVENTS.labels(resource="pods").inc()
        pod, key = event["object"], cache.key_of(event["object"])
        if not shard.has(key.namespace):
            return
        news = cache.drop_pod(pod) if event["type"] == "DELETED" else cache.put_pod(pod)
        if news:
            queue.add(key)
