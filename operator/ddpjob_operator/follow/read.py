"""What the API server has of one job, for a person who asks: the object, its pods and the warnings about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import ValidationError

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import Phase
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.names import LABEL_UID
from ddpjob_operator.follow.kueue import read_queued
from ddpjob_operator.follow.rank_reports import read_reports
from ddpjob_operator.follow.why import Seen, Warned
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import NAME, NAMESPACE, events
from ddpjob_operator.wire.events import EventView, parse_event
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.objects import parse_time
from ddpjob_operator.wire.pods import parse_pod

REPLACED = "Replaced"
"""Reason of the error that the job which was asked for is gone, and another one has its name."""
_FORBIDDEN = 403
_WAITING = (Phase.PENDING, Phase.STARTING, Phase.RESTARTING)


async def read_job(client: Client, namespace: str, name: str, uid: str | None = None) -> Json:
    """The DDPJob `name`; with `uid`, only if it is still this one.

    Raises:
        ApiError: there is none, it is another one, or it may not be read; the message says what to do.
    """
    if NAMESPACE.fullmatch(namespace) is None:
        raise ApiError(404, "NotFound", f"there is no namespace {namespace}; name another one with --namespace")
    try:
        if NAME.fullmatch(name) is not None:
            found = await client.get(f"{paths.jobs(namespace)}/{name}", "ddpjobs")
            if uid is not None and found["metadata"]["uid"] != uid:
                gone = f"the DDPJob {name} in namespace {namespace} was deleted, and another job has its name now"
                raise ApiError(404, REPLACED, f"{gone}; ask again by name for that one")
            return found
    except ApiError as error:
        if not error.not_found or error.reason == REPLACED:
            raise
    detail = await _which_are_there(client, namespace)
    raise ApiError(404, "NotFound", f"there is no DDPJob {name} in namespace {namespace}; {detail}")


async def read_pods_on(client: Client, node: str) -> list[Json]:
    """The pods of a Kubernetes node, of all namespaces."""
    items, _ = await client.list(paths.pods(None), "pods", fieldSelector=f"spec.nodeName={node}")
    return items


async def read_pods(client: Client, namespace: str, job: Json) -> list[Json]:
    """The pods that the job controls."""
    uid = job["metadata"]["uid"]
    items, _ = await client.list(paths.pods(namespace), "pods", labelSelector=f"{LABEL_UID}={uid}")
    return [item for item in items if _is_controlled_by(item, uid)]


async def read_events(client: Client, namespace: str, selector: str) -> list[Json]:
    """Events of the namespace by a field selector; none where the user may not read them."""
    try:
        items, _ = await client.list(events(namespace), "events", fieldSelector=selector)
    except ApiError as error:
        if error.status != _FORBIDDEN:
            raise
        return []
    return items


async def see(client: Client, namespace: str, name: str, uid: str | None = None) -> Seen:
    """The job with everything that `why` reads."""
    job = await read_job(client, namespace, name, uid)
    pods = await read_pods(client, namespace, job)
    warnings = await read_events(client, namespace, "type=Warning")
    seen = seen_of(job, pods, filter(None, map(parse_event, warnings)), datetime.now(UTC))
    if seen.status.phase in _WAITING:
        return replace(seen, queued=await read_queued(client, pods))
    if seen.status.phase is not Phase.RUNNING:
        return seen
    uid = job["metadata"]["uid"]
    return replace(seen, reports=await read_reports(client, namespace, uid, seen.status.attempt, seen.pods))


def seen_of(job: Json, pods: Iterable[Json], events: Iterable[EventView], now: datetime) -> Seen:
    """A job with its pods, and those of the events that are warnings about them."""
    of_job = tuple(pods)
    return Seen(
        name=job["metadata"]["name"],
        created=parse_time(job["metadata"].get("creationTimestamp")) or now,
        spec=_spec(job),
        status=parse_status(job.get("status") or {}),
        pods=tuple(parse_pod(pod) for pod in of_job),
        warnings=_warnings(events, {item["metadata"]["uid"] for item in (job, *of_job)}),
        now=now,
        deleted=parse_time(job["metadata"].get("deletionTimestamp")),
        finalizers=tuple(job["metadata"].get("finalizers") or ()),
        namespace=job["metadata"].get("namespace") or "",
    )


async def _which_are_there(client: Client, namespace: str) -> str:
    jobs, _ = await client.list(paths.jobs(namespace), "ddpjobs")
    names = sorted(job["metadata"]["name"] for job in jobs)
    return f"it has {', '.join(names[:10])}" if names else "it has none; name another one with --namespace"


def _warnings(events: Iterable[EventView], uids: set[str]) -> tuple[Warned, ...]:
    ours = (event for event in events if event.is_warning and event.about_uid in uids)
    found = (Warned(event.time, event.about, event.reason, event.message) for event in ours)
    return tuple(sorted(found, key=lambda warned: warned.time))


def _spec(job: Json) -> DDPJobSpec | None:
    try:
        return DDPJobSpec.model_validate(job.get("spec") or {})
    except ValidationError:
        return None


def _is_controlled_by(pod: Json, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)
