"""Complete lists, as the resync takes them in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpjob_operator.cluster.cache import Cache, Listed
from ddpjob_operator.cluster.owners import Key


def take_lists(
    cache: Cache, namespace: str | None, jobs: Iterable[dict[str, Any]], pods: Iterable[dict[str, Any]], version: int
) -> set[Key]:
    """Give `cache` complete lists of one namespace (None: of all), and return what `end_lists` does."""
    for job in jobs:
        cache.put_job(job)
    for pod in pods:
        cache.put_pod(pod)
    listed = (Listed(frozenset(obj["metadata"]["uid"] for obj in objects), version) for objects in (jobs, pods))
    return cache.end_lists(namespace, *listed)
