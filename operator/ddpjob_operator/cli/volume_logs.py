"""`ddpjob logs` once the pods are gone: what they printed, from the job's volume, which a short-lived pod reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cli.on_cluster import REFUSED, SUCCEEDED, print_line, print_note
from ddpjob_operator.cli.volume_pod import run_pod
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH
from ddpjob_operator.core.manifests.volume_pod import VolumeCommand, build_claim_pod, build_volume_pod
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.follow.logs import Line, Wanted
from ddpjob_operator.follow.reader import claim_of, image_of, image_with, read_claim
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

_LINE = re.compile(r"\[rank (\d{1,7})\] ")


def may_be_on_volume_alone(status: DDPJobStatus, wanted: Wanted) -> bool:
    """Whether a job without wanted pods had some, whose logs its volume has."""
    is_earlier = wanted.attempt is not None and wanted.attempt < status.attempt
    return status.is_final or status.phase is Phase.SUSPENDED or is_earlier


async def print_logs_of_job(
    client: Client, namespace: str, found: Json, pods: Sequence[Json], wanted: Wanted, image: str | None
) -> int:
    """Print the wanted lines of a job; the exit code.

    Raises:
        ApiError: the pod could not be made or did not start, or the volume is gone.
    """
    try:
        job = parse_job(found)
    except InvalidJob as error:
        raise ApiError(422, "Invalid", f"{found['metadata']['name']}: {'; '.join(error.problems)}") from error
    used = image or job.spec.image or image_of(pods)
    try:
        # a pod whose claim is gone would wait for minutes
        claim = await read_claim(client, namespace, claim_of(job))
        used = used or image_with(claim, job.name)
    except ApiError as error:
        if error.status != 403 or used is None:
            raise
    attempt = job.status.attempt if wanted.attempt is None else wanted.attempt
    manifest = build_volume_pod(job, used, _command(job.name, wanted, attempt))
    return await _print(client, namespace, manifest, claim_of(job))


async def print_logs_of_claim(
    client: Client, namespace: str, name: str, claim: str | None, wanted: Wanted, image: str | None
) -> int:
    """The same of a job that is gone, by its claim: `claim`, or the one that the operator made for it."""
    found = await read_claim(client, namespace, claim or pvc_name(name))
    manifest = build_claim_pod(found, image or image_with(found, name), _command(name, wanted, wanted.attempt))
    return await _print(client, namespace, manifest, found["metadata"]["name"])


def _command(name: str, wanted: Wanted, attempt: int | None) -> VolumeCommand:
    """The lines are chosen in the pod: the log of a pod is no way for gigabytes."""
    chosen = {
        "attempt": attempt,
        "node": wanted.node,
        "rank": wanted.rank,
        "grep": wanted.pattern.pattern if wanted.pattern is not None else None,
        "tail": wanted.tail,
        "since": wanted.since_seconds,
    }
    # with =, as a pattern may begin with a dash; $$, because Kubernetes reads $(NAME)
    options = (f"--{option}={value}".replace("$", "$$") for option, value in chosen.items() if value is not None)
    return VolumeCommand("logs", "ddp_trainer.logs.pods", (SHARED_PATH, name, *options))


async def _print(client: Client, namespace: str, manifest: Json, claim: str) -> int:
    print_note(f"a short-lived pod reads the logs from the volume, claim {claim}; Ctrl-C deletes it")
    shown = False

    def say(text: str) -> None:
        nonlocal shown
        shown = True
        if found := _LINE.match(text):
            print_line(Line("", 0, int(found[1]), text[found.end() :]))
        else:
            print(text, file=sys.stderr, flush=True)

    if await run_pod(client, namespace, manifest, say):
        return REFUSED
    if not shown:
        print_note("no line on the volume matches")
    return SUCCEEDED
