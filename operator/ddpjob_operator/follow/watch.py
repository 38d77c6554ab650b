"""A job on a cluster as it goes on, shown like a run on this machine, until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.ledger.ranks import NO_REPORTS, Reports
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.follow.outage import Patient, seconds_to_next_look
from ddpjob_operator.follow.rank_reports import REFUSED, read_reports
from ddpjob_operator.follow.read import read_events, read_job, read_pods
from ddpjob_operator.local.display import Display
from ddpjob_operator.local.observed import NodeView, RunView
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.objects import parse_time
from ddpjob_operator.wire.pods import parse_pod

SECONDS_BETWEEN_LOOKS = 1.0
LOOKS_BETWEEN_RANKS = 5
"""Each pod is asked what its ranks do, through the API server, which need not be in each look."""


async def watch(
    client: Client,
    namespace: str,
    name: str,
    display: Display,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    *,
    uid: str | None = None,
) -> DDPJobStatus:
    """Show the job until it has succeeded or failed; the status that it ended with. `uid`: only this one of the name.

    Raises:
        ApiError: there is no such job, it was deleted, the cluster refused, or gave no answer for five minutes.
    """
    ranks, patient = _Ranks(client, namespace), Patient(display.write_line)
    job = await patient.read(read_job, client, namespace, name, uid)
    uid = job["metadata"]["uid"]
    shown = {_key(event) for event in await patient.read(_of_job, client, namespace, job)}
    while True:
        job = await patient.read(read_job, client, namespace, name, uid)
        status = parse_status(job.get("status") or {})
        for event in await patient.read(_of_job, client, namespace, job):
            if _key(event) not in shown:
                shown.add(_key(event))
                display.event(Event(event.get("type") or "", event.get("reason") or "", event.get("message") or ""))
        pods = [parse_pod(pod) for pod in await patient.read(read_pods, client, namespace, job)]
        pods_took = patient.took
        created = parse_time(job["metadata"].get("creationTimestamp")) or now()
        reports = await ranks.look(uid, status, pods)
        nodes = nodes_of(status, pods)
        display.show(RunView(name, status, nodes, status.start_time or created, now(), reports=reports))
        if status.is_final:
            return status
        await asyncio.sleep(seconds_to_next_look(pods_took, SECONDS_BETWEEN_LOOKS))


class _Ranks:
    """What the ranks of a running job say, asked for now and then; not again once that was refused."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._reports, self._attempt, self._looks = NO_REPORTS, -1, 0

    async def look(self, uid: str, status: DDPJobStatus, pods: Sequence[PodView]) -> Reports:
        if status.phase is not Phase.RUNNING:
            return NO_REPORTS
        if self._reports.note == REFUSED:
            return self._reports
        if status.attempt != self._attempt:
            self._attempt, self._looks = status.attempt, 0
        if self._looks % LOOKS_BETWEEN_RANKS == 0:
            self._reports = await read_reports(self._client, self._namespace, uid, status.attempt, pods)
        self._looks += 1
        return self._reports


def nodes_of(status: DDPJobStatus, pods: Iterable[PodView]) -> tuple[NodeView, ...]:
    """The pods of the current attempt by node rank, the spares last."""
    current = [pod for pod in pods if pod.attempt == status.attempt]
    current.sort(key=lambda pod: (pod.node_rank is None, pod.node_rank or 0, pod.name))
    return tuple(
        NodeView(pod.node_rank, pod.name, str(pod.phase), None, None, _doing(pod), None, pod.node_name)
        for pod in current
    )


def _doing(pod: PodView) -> str:
    if pod.deleting:
        return "leaving"
    if pod.reason and not pod.ready:
        return pod.reason
    return "ready" if pod.ready and not pod.ended else ""


async def _of_job(client: Client, namespace: str, job: Json) -> list[Json]:
    events = await read_events(client, namespace, f"involvedObject.uid={job['metadata']['uid']}")
    return sorted(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")


def _key(event: Json) -> tuple[str, int]:
    """An event that is posted again has its count raised."""
    return event["metadata"]["uid"], event.get("count") or (event.get("series") or {}).get("count") or 0
