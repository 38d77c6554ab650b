"""What the launchers of a job's pods say of their ranks: their `/status`, through the API server's proxy.

A user with the role edit may use the proxy; it needs no route to the pods. What comes back is from a user's container:
its size is bounded, and one that does not answer soon is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.manifests.pod_environment import STATUS_PORT
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status
from ddpjob_operator.follow.table import printable
from ddpjob_operator.page.values import RankRow
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

_SECONDS = 2.0
_LARGEST = 256 << 10
_MOST_PODS = 64
_FORBIDDEN = 403


async def read_ranks(
    client: Client, namespace: str, uid: str, attempt: int, pods: Sequence[PodView]
) -> tuple[tuple[RankRow, ...], str]:
    """The ranks of an attempt, and a note if some are missing."""
    asked = [pod for pod in pods if pod.attempt == attempt and pod.running and not pod.deleting]
    answers = await asyncio.gather(*(_ask(client, namespace, pod) for pod in asked[:_MOST_PODS]))
    now, rows = datetime.now(UTC), []
    for pod, answer in zip(asked, answers, strict=False):
        if isinstance(answer, TrainerReport) and answer.is_of(uid, attempt):
            rows += rows_of(answer, pod, now)
    return tuple(rows), _note(asked, answers)


def rows_of(report: TrainerReport, pod: PodView, now: datetime) -> list[RankRow]:
    """The ranks of one pod."""
    return [
        RankRow(
            rank=rank.rank,
            pod=pod.name,
            node=pod.node_name or "",
            phase=printable(rank.phase),
            step=rank.step,
            step_seconds=rank.step_seconds,
            data_seconds=rank.data_seconds,
            time=None if rank.age_seconds is None else now - timedelta(seconds=rank.age_seconds),
        )
        for rank in report.ranks
    ]


async def _ask(client: Client, namespace: str, pod: PodView) -> TrainerReport | ApiError | None:
    path = f"{paths.pods(namespace)}/{pod.name}:{STATUS_PORT}/proxy/status"
    try:
        return read_status(await client.bounded(path, _LARGEST, _SECONDS))
    except ApiError as error:
        return error


def _note(asked: Sequence[PodView], answers: Sequence[TrainerReport | ApiError | None]) -> str:
    refused = next((found for found in answers if isinstance(found, ApiError) and found.status == _FORBIDDEN), None)
    if refused is not None:
        return "What each rank reports cannot be read: ask for get on pods/proxy, which the role edit has."
    if len(asked) > _MOST_PODS:
        return f"The ranks of {_MOST_PODS} of {len(asked)} pods."
    silent = sum(1 for found in answers if not isinstance(found, TrainerReport))
    return f"{silent} of {len(asked)} pods do not answer." if silent else ""
