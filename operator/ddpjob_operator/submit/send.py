"""Sending a job and its code to a cluster."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cluster import paths
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit import config_maps
from ddpjob_operator.submit.job import Content, Submission, resuming, says_what_to_resume
from ddpjob_operator.submit.owner import local_user, with_user
from ddpjob_operator.submit.pack import name_of
from ddpjob_operator.wire.jobs import parse_status

_RESOURCE = "ddpjobs"
_SECONDS_TO_DELETE = 120.0
_SECONDS_BETWEEN_LOOKS = 0.5
_NOT_RETAINED = "spec.shared.retain: false"


@dataclass(frozen=True, slots=True)
class Sent:
    """What was done."""

    job: Json
    code_bytes: int
    """Bytes of code that were not in the cluster yet."""
    replaced: str | None
    """The phase of the job that had this name before."""


async def send(
    client: Client, namespace: str, submission: Submission, *, replace: bool, note: Callable[[str], None]
) -> Sent:
    """Create the job, with its code. The user here is its owner, unless it names one. A job of that name that has
    finished is replaced, another one with `replace`.

    Where that one has succeeded, this one begins anew, unless it says what it resumes from: it would resume after the
    last step, and end at once. The server accepts this one before anything is changed. The code is sent first: pods
    never wait for it. The job becomes the owner of the code afterwards.

    Raises:
        ApiError: the server refused, or a job of that name has not finished.
    """
    name = submission.job.name
    before = await _present(client, namespace, name)
    phase = None if before is None else parse_status(before.get("status") or {}).phase
    if before is not None and not replace and not (phase is not None and phase.final):
        then = "it saves a snapshot and ends, and this one resumes from it"
        if _loses_its_volume(before):
            then = f"it ends, and its volume with it ({_NOT_RETAINED}), which `ddpjob cancel {name} --keep` keeps"
        raise ApiError(
            409,
            "AlreadyExists",
            f"the job {name} exists and is {phase or 'new'}; give this one another --name, "
            f"or replace it with --replace: {then}",
        )
    if phase is Phase.SUCCEEDED and not says_what_to_resume(submission):
        submission = resuming(submission, own=True)
        note(f"{name} has succeeded before, so this one begins anew; --resume would go on from its snapshots")
    content = with_user(submission.content, local_user())
    parts = submission.code.parts if submission.code else ()
    if not await _is_accepted(client, namespace, content, in_place=before is not None):
        note("an admission webhook of this cluster answers no dry runs, so it sees the job only when it is created")
    code_bytes = await config_maps.send(client, namespace, parts)
    if before is not None:
        if _loses_its_volume(before):
            note(f"the volume of the {name} before goes with it, and all snapshots ({_NOT_RETAINED})")
        await _remove(client, namespace, before, parts)
    job = await client.create(paths.jobs(namespace), _RESOURCE, content)
    if left_out := ", ".join(_left_out(content["spec"], job["spec"], "spec")):
        note(f"the cluster has left out {left_out}: its operator may be older than this command (`ddpjob version`)")
    try:
        await config_maps.keep_with(client, namespace, job, parts)
    except ApiError as error:
        note(f"its code stays in the cluster when the job is deleted: {error.message}")
    return Sent(job, code_bytes, None if before is None else str(phase or "new"))


async def _is_accepted(client: Client, namespace: str, content: Content, *, in_place: bool) -> bool:
    """Have the server judge the job in a dry run, under another name, since there may be a job of this one.

    False if it cannot: a webhook with side effects takes part in no dry run.

    Raises:
        ApiError: it refused.
    """
    name = content["metadata"]["name"]
    other = other_name(name)
    trial = {**content, "metadata": {**content["metadata"], "name": other}}
    try:
        job = await client.create(paths.jobs(namespace), _RESOURCE, trial, dry_run=True)
    except ApiError as error:
        if error.no_dry_run:
            return False
        if in_place and error.status == 403 and "exceeded quota" in error.message:
            return True  # the other job leaves its place
        raise ApiError(
            error.status, error.reason, error.message.replace(other, name), {**error.details, "name": name}
        ) from None
    if "code" in content["spec"] and "code" not in job["spec"]:  # it drops fields that its CRD does not know
        older = "the operator of this cluster is older than this command: its DDPJobs have no spec.code"
        raise ApiError(0, "OlderOperator", f"{older}; upgrade it, or put the script into the image")
    return True


def _left_out(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Paths of what was sent and is not in what the server has made of it: it drops fields that its CRD does not know,
    without an error. A field that is null has not been set.
    """
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            if name in kept:
                yield from _left_out(value, kept[name], f"{path}.{name}")
            elif value is not None:
                yield f"{path}.{name}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, value in enumerate(given):
            yield from _left_out(value, kept[index], f"{path}[{index}]")


def other_name(name: str) -> str:
    """As long as this one, where there is room: rules of the server may bound the length."""
    suffix = f"-{uuid.uuid4().hex[:8]}"
    return name[: max(len(name) - len(suffix), 1)].rstrip("-.") + suffix


async def _remove(client: Client, namespace: str, job: Json, parts: Iterable[bytes]) -> None:
    """Delete the job, but not the code that it has in common with the one that replaces it.

    Raises:
        ApiError: the server refused. The job has its code as before.
    """
    shared = [part for part in parts if name_of(part) in _config_maps(job)]
    metadata = job["metadata"]
    try:
        await config_maps.release(client, namespace, metadata["uid"], [name_of(part) for part in shared])
        await _delete(client, namespace, metadata["name"], metadata["uid"])
    except BaseException:
        with suppress(ApiError):
            await config_maps.keep_with(client, namespace, job, shared)
        raise


def _loses_its_volume(job: Json) -> bool:
    shared = (job.get("spec") or {}).get("shared") or {}
    return not shared.get("claimName") and shared.get("retain") is False


def _config_maps(job: Json) -> list[str]:
    code = (job.get("spec") or {}).get("code") or {}
    return list(code.get("configMaps") or ())


async def _present(client: Client, namespace: str, name: str) -> Json | None:
    try:
        return await client.get(f"{paths.jobs(namespace)}/{name}", _RESOURCE)
    except ApiError as error:
        if error.not_found and error.details.get("name") == name:
            return None
        if error.not_found:  # of the whole kind
            error.message = "the cluster has no DDPJobs; install the operator first (README, Install)"
        raise


async def _delete(client: Client, namespace: str, name: str, uid: str) -> None:
    """Delete the job and wait until it is gone; its pods may still be saving."""
    path = f"{paths.jobs(namespace)}/{name}"
    try:
        await client.delete(path, _RESOURCE, {"preconditions": {"uid": uid}})
    except ApiError as error:
        if not error.not_found:
            raise
    for _ in range(int(_SECONDS_TO_DELETE / _SECONDS_BETWEEN_LOOKS)):
        left = await _present(client, namespace, name)
        if left is None or left["metadata"]["uid"] != uid:
            return
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
    waited = f"the job {name} is deleted but still there after {_SECONDS_TO_DELETE:g} s; see its metadata.finalizers"
    raise ApiError(0, "Timeout", waited)
