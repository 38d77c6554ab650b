"""`ddpjob debug`: a shell in a pod like the one that failed, for a limited time."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import SUCCEEDED, GlobalOptions
from ddpjob_operator.cli.terminal import is_terminal, print_note
from ddpjob_operator.core.manifests.debug_pod import Visit, build_debug_pod
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.observed import PodPhase
from ddpjob_operator.follow.debug import Failed, as_text, failed_pod, in_words, pod_of, shell_command
from ddpjob_operator.follow.outage import is_passing
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.follow.reader import image_of
from ddpjob_operator.follow.volume_pod import SECONDS_BETWEEN_LOOKS, started_pod
from ddpjob_operator.local.observed import seconds_in_words
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import InvalidJob, parse_job


def debug(cluster: Cluster, name: str, limit: int, *, any_node: bool, gpus: bool, image: str | None) -> int:
    """Start the pod, open a shell in it or print how to, and delete it."""

    async def ask(client: Client, namespace: str) -> int:
        found = await read_job(client, namespace, name)
        pods = await read_pods(client, namespace, found)
        job = _job(found)
        failed = _failed(job, pods, cluster, client.namespace)
        visit = Visit(limit, None if any_node else failed.node, gpus)
        manifest = build_debug_pod(job, _pod_of(failed, job, image or _image(failed, job, pods)), visit)
        advice = "free what it waits for, or try --any-node" if visit.node is not None else "free what it waits for"
        print_note(f"starting a pod {in_words(failed, visit.node)}")
        async with started_pod(client, namespace, manifest, advice, print_note) as path:
            command = shell_command(namespace, path.rpartition("/")[2], cluster.context, job)
            if is_terminal() and is_terminal(sys.stdin) and shutil.which(command[0]):
                print_note(f"the pod is deleted when the shell ends, and after {seconds_in_words(limit)} at the latest")
                return await _run(command)
            print(_to_copy(command), flush=True)
            print_note(f"Ctrl-C deletes the pod; it ends after {seconds_in_words(limit)} at the latest")
            await _until_it_ends(client, path)
            return SUCCEEDED

    return asked(cluster, ask)


def _job(found: Json) -> Job:
    try:
        return parse_job(found)
    except InvalidJob as error:
        raise ApiError(422, "Invalid", f"{found['metadata']['name']}: {'; '.join(error.problems)}") from error


def _failed(job: Job, pods: list[Json], cluster: Cluster, default: str) -> Failed:
    if (failed := failed_pod(job, pods)) is not None:
        return failed
    running = next((pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"), None)
    todo = (
        f"{_to_copy(shell_command(job.namespace, running, cluster.context, job))} opens a shell in a pod that runs"
        if running
        else f"{cluster.command('why', job.name, namespace=job.namespace, default=default)} says where it is"
    )
    raise ApiError(409, "Conflict", f"no pod of {job.name} has failed; {todo}")


def _to_copy(command: tuple[str, ...]) -> str:
    """For another shell, which has not the kubeconfig that was given before the verb in its environment."""
    return as_text((command[0], *GlobalOptions.to_copy(), *command[1:]))


def _image(failed: Failed, job: Job, pods: list[Json]) -> str:
    """Of the failed pod; else of the job, or of another pod of it."""
    found = image_of([failed.pod]) if failed.pod is not None else job.spec.image or image_of(pods)
    if found is None:
        raise ApiError(0, "NoImage", f"{job.name} has no spec.image and no pod any more; name one with --image")
    return found


def _pod_of(failed: Failed, job: Job, image: str) -> Manifest:
    try:
        return pod_of(failed, job, image)
    except ValueError as error:
        raise ApiError(422, "Invalid", f"{job.name}: {error}") from error


async def _run(command: tuple[str, ...]) -> int:
    """Run it on this terminal, which it has to itself until it ends."""
    process = await asyncio.create_subprocess_exec(*command, env=os.environ)
    return await process.wait()


async def _until_it_ends(client: Client, path: str) -> None:
    """Until its time is over, or somebody deletes it. An API server that does not answer for a while is asked again.

    Raises:
        ApiError: the cluster refused, or the login has ended.
    """
    while True:
        try:
            pod = await client.get(path, "pods")
            if PodPhase((pod.get("status") or {}).get("phase") or PodPhase.PENDING).final:
                return
        except ApiError as error:
            if error.not_found:
                return
            if not is_passing(error):
                raise
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
