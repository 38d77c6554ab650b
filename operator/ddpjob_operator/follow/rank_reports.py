"""What the launchers of a job's pods say of their ranks: their `/status`, through the API server's proxy.

A user with the role edit may use the proxy; it needs no route to the pods. What comes back is from a user's container:
its size is bounded, and one that does not answer soon is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.ledger.ranks import Reports, reports_of, together
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

_SECONDS = 2.0
_LARGEST = 256 << 10
_MOST_PODS = 64
_FORBIDDEN = 403
REFUSED = "What each rank reports cannot be read: ask for get on pods/proxy, which the role edit has."
"""The note where the user lacks that right."""


async def read_reports(client: Client, namespace: str, uid: str, attempt: int, pods: Sequence[PodView]) -> Reports:
    """What the pods of an attempt say, with a note if some is missing."""
    asked = [pod for pod in pods if pod.attempt == attempt and pod.running and not pod.deleting]
    answers = await asyncio.gather(*(_ask(client, namespace, pod) for pod in asked[:_MOST_PODS]))
    now = datetime.now(UTC)
    said = [
        reports_of(answer, pod.name, pod.node_name or "", now)
        for pod, answer in zip(asked, answers, strict=False)
        if isinstance(answer, TrainerReport) and answer.is_of(uid, attempt)
    ]
    return together(said, _note(asked, answers))


async def _ask(client: Client, namespace: str, pod: PodView) -> TrainerReport | ApiError | None:
    path = f"{paths.pods(namespace)}/{pod.name}:{STATUS_PORT}/proxy/status"
    try:
        return read_status(await client.bounded(path, _LARGEST, _SECONDS))
    except ApiError as error:
        return error


def _note(asked: Sequence[PodView], answers: Sequence[TrainerReport | ApiError | None]) -> str:
    refused = next((found for found in answers if isinstance(found, ApiError) and found.status == _FORBIDDEN), None)
    if refused is not None:
        return REFUSED
    if len(asked) > _MOST_PODS:
        return f"The ranks of {_MOST_PODS} of {len(asked)} pods."
    silent = sum(1 for found in answers if not isinstance(found, TrainerReport))
    if silent and silent == len(asked) > 1:
        return f"None of {len(asked)} pods answers the API server: does a NetworkPolicy keep it out (settings.READERS)?"
    return f"{silent} of {len(asked)} pods do not answer." if silent else ""
