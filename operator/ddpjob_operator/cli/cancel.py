"""`ddpjob cancel`: end a job by deleting it, as kubectl does, and say what is kept and how to resume."""

from __future__ import annotations

import asyncio
import sys

from ddpjob.handle import AsyncJob
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, INTERRUPTED, SUCCEEDED
from ddpjob_operator.cli.terminal import is_terminal, print_note
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.follow.ending import cancelled_in_words, loses_its_volume, pods_in_words
from ddpjob_operator.follow.outage import Patient
from ddpjob_operator.follow.read import read_job, read_pods
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_status

SECONDS_BETWEEN_LOOKS = 1.0


def cancel(cluster: Cluster, name: str, *, keep: bool, unasked: bool, wait: bool) -> int:
    """Delete the job after a question on a terminal; `keep` keeps a claim that would be deleted with it."""
    found: list[Json] = []

    async def find(client: Client, namespace: str) -> int:
        job = await read_job(client, namespace, name)
        status = parse_status(job.get("status") or {})
        if status.is_final:
            ended = f"{name} has {str(status.phase).lower()}, so there is nothing to cancel"
            raise ApiError(409, "Conflict", f"{ended}; kubectl delete ddpjob {name} removes its record")
        found.append(job)
        return SUCCEEDED

    async def end(client: Client, namespace: str) -> int:
        job = found[0]
        if "deletionTimestamp" in job["metadata"]:
            print(f"{name} is being deleted already")
        else:
            if keep and loses_its_volume(job):
                await _disown_claim(client, namespace, job)
            await AsyncJob(client, namespace, name).cancel(job["metadata"]["uid"])
            print("\n".join(cancelled_in_words(job, kept=keep)), flush=True)
        if wait:
            await _wait_for_pods(client, namespace, job)
        return SUCCEEDED

    if (code := asked(cluster, find)) != SUCCEEDED:
        return code
    # outside of the event loop, in which Ctrl-C would wait for the answer
    try:
        confirmed = unasked or "deletionTimestamp" in found[0]["metadata"] or _is_confirmed(found[0], keep)
    except KeyboardInterrupt:
        print(f"\n{name} goes on")
        return INTERRUPTED
    if not confirmed:
        print(f"{name} goes on")
        return FAILED
    return asked(cluster, end, interrupted=f"{name} goes on ending; ddpjob get {name} says whether it is still there")


def _is_confirmed(job: Json, keep: bool) -> bool:
    """What a person answers; yes where there is none to ask."""
    if not (is_terminal(sys.stdin) and is_terminal()):
        return True
    print(f"{job['metadata']['name']}: {pods_in_words(job)}.")
    if loses_its_volume(job) and not keep:
        print("Its volume is deleted with it, with all snapshots (spec.shared.retain: false); --keep keeps it.")
    try:
        answer = input("Cancel it? [y/N] ")
    except EOFError:
        print()
        return False
    return answer.strip().lower() in ("y", "yes")


async def _disown_claim(client: Client, namespace: str, job: Json) -> None:
    """Without an owner the claim outlives the job, as one that is retained."""
    path = f"{paths.claims(namespace)}/{pvc_name(job['metadata']['name'])}"
    try:
        claim = await client.get(path, "persistentvolumeclaims")
    except ApiError as error:
        if error.not_found:  # the job never came so far
            return
        raise
    uid, metadata = job["metadata"]["uid"], claim["metadata"]
    others = [owner for owner in metadata.get("ownerReferences") or () if owner.get("uid") != uid]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "ownerReferences": others}}
    await client.merge_patch(path, "persistentvolumeclaims", body)


async def _wait_for_pods(client: Client, namespace: str, job: Json) -> None:
    left, patient = -1, Patient(print_note)
    while pods := await patient.read(read_pods, client, namespace, job):
        if len(pods) != left:
            left = len(pods)
            print(f"waiting for {left} {'pod' if left == 1 else 'pods'} to end", file=sys.stderr, flush=True)
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    print(f"no pod of {job['metadata']['name']} is left")
