"""A short-lived pod beside a job: made, waited for, and deleted, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.observed import PodPhase
from ddpjob_operator.follow.lines import STAMPED, SoFar, in_utc
from ddpjob_operator.follow.outage import SECONDS_WITHOUT_ANSWER, is_passing
from ddpjob_operator.follow.table import printable, visible
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.pods import parse_pod

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_START = 180.0
FREE = "free the nodes or the claim that it waits for, and try again"
"""Advice for a pod that reads a volume and does not start."""

Note = Callable[[str], None]
"""Takes a line for a person: what is waited for, and what became of the pod."""


async def run_pod(client: Client, namespace: str, manifest: Json, say: Note, note: Note) -> int:
    """Say each line that the pod prints; its exit code.

    Raises:
        ApiError: it could not be made, did not start within three minutes, or was deleted meanwhile.
    """
    container = manifest["spec"]["containers"][0]["name"]
    async with started_pod(client, namespace, manifest, FREE, note) as path:
        async for text in log_of(client, path, container):
            say(text)
        return await exit_code(client, path, container)


@asynccontextmanager
async def started_pod(client: Client, namespace: str, manifest: Json, advice: str, note: Note) -> AsyncIterator[str]:
    """The path of a pod that has started; it is deleted at the end of the block.

    Raises:
        ApiError: it could not be made, or did not start within three minutes, which ends with `advice`.
    """
    # named here: Ctrl-C may come before the answer, and the pod must be found all the same
    named = _named(manifest)
    name = named["metadata"]["name"]
    path, is_there, is_stopped = f"{paths.pods(namespace)}/{name}", True, False
    try:
        try:
            await client.create(paths.pods(namespace), "pods", named)
        except ApiError as error:
            is_there = not 400 <= error.status < 500  # refused, as without the right to
            raise
        await _started(client, path, advice, note)
        yield path
    except asyncio.CancelledError:
        is_stopped = True
        raise
    finally:
        if is_there and await _deleted(client, path, note) and is_stopped:
            note(f"stopped; pod {name} is deleted")


def _named(manifest: Json) -> Json:
    """A new name where the server would make one."""
    metadata = {**manifest["metadata"]}
    if prefix := metadata.pop("generateName", None):
        metadata["name"] = f"{prefix}{secrets.token_hex(4)}"
    return {**manifest, "metadata": metadata}


async def _started(client: Client, path: str, advice: str, note: Note) -> None:
    """Wait until its log can be read, and say what it waits for."""
    clock = asyncio.get_running_loop().time
    latest, said = clock() + SECONDS_TO_START, ""
    while True:
        found = parse_pod(await client.get(path, "pods"))
        if found.phase is not PodPhase.PENDING:
            return
        waits = printable(f"{found.reason}: {found.message}" if found.message else found.reason)
        waits = waits or (f"starting on node {found.node_name}" if found.node_name else "no node yet")
        if clock() > latest:
            problem = f"pod {found.name} has not started within {SECONDS_TO_START:.0f} s: {waits}"
            raise ApiError(0, "NotStarted", f"{problem}; {advice}")
        if waits != said:
            said = waits
            note(f"waiting for pod {found.name}: {waits}")
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


async def log_of(client: Client, path: str, container: str) -> AsyncGenerator[str, None]:
    """The lines of the log of a pod's container, until that ends. It is named, as a webhook may have injected another
    one, and an API server then refuses to choose.

    A connection that breaks, as one that is silent for long may, is made again from the last line on. So is one that
    ends while the container runs: where a kubelet is restarted, the API server ends a log as if it were over. What the
    kubelet says in the place of a log that it does not have is a line, too.

    Raises:
        ApiError: the cluster refused, the pod is gone, or its kubelet gave no answer for five minutes.
    """
    so_far, query = SoFar(), {"container": container, "follow": "true", "timestamps": "true"}
    goes_on, since, clock = False, None, asyncio.get_running_loop().time
    while True:
        instead = ""
        so_far.connected()
        try:
            async for raw in client.lines(f"{path}/log", **query):
                if not STAMPED.match(raw):
                    instead = raw
                    continue
                stamp, _, text = raw.partition(" ")
                if so_far.is_new(in_utc(stamp), text):
                    yield visible(text)
            has_ended, since = True, None
        except ApiError as error:
            if error.status and not (goes_on and is_passing(error)):  # the kubelet that is restarted does not answer
                raise
            if not error.status:
                since = None
            elif since is None:
                since = clock()
            elif clock() - since >= SECONDS_WITHOUT_ANSWER:  # the node is lost, and its pod runs until it is deleted
                raise
            has_ended = False
        pod = await client.get(path, "pods")  # raises where the API server itself does not answer
        goes_on = not parse_pod(pod).phase.final and _terminated(pod, container) is None
        if has_ended and not goes_on:
            if instead and not so_far.stamp:
                yield visible(instead)
            return
        query |= {"sinceTime": so_far.stamp} if so_far.stamp else {}
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


async def exit_code(client: Client, path: str, name: str) -> int:
    """That of the container of a pod whose log has ended, a moment before its status says how."""
    while True:
        pod = await client.get(path, "pods")
        if (ended := _terminated(pod, name)) is not None:
            return int(ended.get("exitCode") or 0)
        status: dict[str, Any] = pod.get("status") or {}
        if status.get("phase") == PodPhase.FAILED:  # evicted, or past its deadline
            why = printable(f"{status.get('reason') or 'it failed'}: {status.get('message') or 'no message'}")
            raise ApiError(0, "Failed", f"the pod that reads the volume was stopped: {why}; try again")
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


def _terminated(pod: Json, name: str) -> Json | None:
    """How the container of a pod has ended, once it has."""
    states = (pod.get("status") or {}).get("containerStatuses") or ()
    found = next((item.get("state") for item in states if item.get("name") == name), None)
    return (found or {}).get("terminated")


async def _deleted(client: Client, path: str, note: Note) -> bool:
    """Whether it is; otherwise what is to be done is said."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
    try:
        await client.delete(path, "pods", options)
    except ApiError as error:
        if not error.not_found:
            name = path.rpartition("/")[2]
            note(f"pod {name} could not be deleted: {error.message}; kubectl delete pod {name}")
            return False
    return True
