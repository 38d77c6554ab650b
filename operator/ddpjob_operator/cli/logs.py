"""`ddpjob logs` of a job on a cluster: from its pods, or from its volume once these are gone."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob.handle import AsyncJob
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.cli.on_cluster import FAILED, SUCCEEDED, Cluster, asked, print_line, print_note
from ddpjob_operator.cli.volume_logs import may_be_on_volume_alone, print_logs_of_claim, print_logs_of_job
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.follow.logs import JobLogs, Wanted, pods_of
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.pods import parse_pod


@dataclass(frozen=True, slots=True)
class Volume:
    """How the volume is read."""

    always: bool = False
    """Also where pods are left."""
    claim: str | None = None
    """The claim of a job that is gone."""
    image: str | None = None


def show_logs(cluster: Cluster, name: str, wanted: Wanted, follow: bool, volume: Volume) -> int:
    """Print what the ranks have printed or, with `follow`, print it until the job has ended."""

    async def ask(client: Client, namespace: str) -> int:
        if volume.claim is not None:
            return await print_logs_of_claim(client, namespace, name, volume.claim, wanted, volume.image)
        try:
            job = await read_job(client, namespace, name)
        except ApiError as error:
            if not error.not_found:
                raise
            return await _of_a_job_that_is_gone(client, namespace, name, wanted, volume.image, error)
        return await _of_a_job(client, namespace, job, wanted, follow, volume)

    return asked(cluster, ask)


async def _of_a_job_that_is_gone(
    client: Client, namespace: str, name: str, wanted: Wanted, image: str | None, gone: ApiError
) -> int:
    """By the claim that the operator made for it, if there is one; else the job is unknown."""
    try:
        return await print_logs_of_claim(client, namespace, name, None, wanted, image)
    except ApiError as error:
        if not error.not_found and error.status != 403:  # who may not see claims has mistyped a name, most likely
            raise
        raise gone from None


async def _of_a_job(client: Client, namespace: str, job: Json, wanted: Wanted, follow: bool, volume: Volume) -> int:
    name, status = job["metadata"]["name"], parse_status(job.get("status") or {})
    logs = await AsyncJob(client, namespace, name).all_logs(wanted)
    pods = await read_pods(client, namespace, job)
    views = pods_of(map(parse_pod, pods), wanted, logs.ranks_per_node)
    if volume.always or (not views and may_be_on_volume_alone(status, wanted) and not (follow and not status.is_final)):
        try:
            code = await print_logs_of_job(client, namespace, job, pods, wanted, volume.image)
        except ApiError:
            _print_tail(status)
            raise
        return FAILED if code == SUCCEEDED and follow and status.phase != "Succeeded" else code
    if follow:
        return SUCCEEDED if await logs.follow(print_line, print_note) else FAILED
    if not await _print_now(logs):
        _explain_silence(views, name)
    return SUCCEEDED


async def _print_now(logs: JobLogs) -> bool:
    """Whether there was a line."""
    found = False
    async for line in logs.now(print_note):
        found = True
        print_line(line)
    return found


def _print_tail(status: DDPJobStatus) -> None:
    """What the status has of a failed pod's log, where the volume cannot be read."""
    if status.last_failure is not None and status.last_failure.log_tail:
        print(status.last_failure.log_tail)


def _explain_silence(pods: list[PodView], name: str) -> None:
    """Where to look if no line came: the pods wait, or print nothing that is wanted."""
    if any(pod.phase != "Pending" for pod in pods):
        print_note("no line of the job's pods matches")
    else:
        print_note(f"no pod of the job has started; ddpjob why {name} says why")
