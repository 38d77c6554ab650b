"""Asks Kueue where the gang of a job waits. What is refused, or not served, becomes part of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ddpjob_operator.follow.queued import VISIBILITY, WORKLOADS, Queued, group_held_back, is_not_served, queued_of
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import collection

_VERSIONS = ("v1beta2", "v1beta1")
"""Of both groups, the newest first. What is read here is the same in both."""


async def read_queued(client: Client, pods: Sequence[Json]) -> Queued | None:
    """Where Kueue holds the pods of a job back; None if it does not, which takes no request."""
    group = group_held_back(pods)
    if group is None:
        return None
    workload, pending = await asyncio.gather(
        _read(client, WORKLOADS, "workloads", group.namespace, group.name),
        _read(client, VISIBILITY, "localqueues", group.namespace, f"{group.queue}/pendingworkloads"),
    )
    return queued_of(group, workload, pending)


async def _read(client: Client, api_group: str, plural: str, namespace: str, rest: str) -> Json | ApiError:
    """The object of the newest version that is served."""
    answer: Json | ApiError = ApiError(404, "NotFound", "")
    for version in _VERSIONS:
        try:
            return await client.get(f"{collection(f'{api_group}/{version}', plural, namespace)}/{rest}", plural)
        except ApiError as error:
            answer = error
        if not is_not_served(answer):
            break
    return answer
