"""Carries out what `core.plan` decided: actions become calls to the API server, and their answers go into the cache.

Every call may be repeated: after a crash, after a lost answer, by a second operator. So "it exists already" is
success when what exists is ours and of the same attempt, "not found" is success for a deletion, and a deletion names
the uid that it means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.cache import Cache, Owner, owner_of
from ddpjob_operator.cluster.client import Client, Json
from ddpjob_operator.cluster.errors import ApiError
from ddpjob_operator.core.model import (
    Action,
    CreateClaim,
    CreatePod,
    CreateService,
    DeletePod,
    Job,
    PointService,
    Problem,
)

logger = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 403, 404, 422})
"""Answers to a create that say no to this object, rather than not now."""


class Refused(Exception):
    """The API server will not have a child of the job. `final` when asking again is pointless."""

    def __init__(self, problem: Problem, *, final: bool = False) -> None:
        super().__init__(f"{problem.reason}: {problem.message}")
        self.problem = problem
        self.final = final


@dataclass(frozen=True, slots=True)
class Applier:
    """Carries out actions for any job, through one client into one cache."""

    client: Client
    cache: Cache

    async def carry_out(self, job: Job, actions: Sequence[Action]) -> Refused | None:
        """All actions of one plan, at once.

        Returns:
            the first refusal, if there was one; the other actions were carried out all the same.

        Raises:
            ApiError: a call failed for a reason that may pass; every other action has been tried too.
        """
        results = await asyncio.gather(*(self._one(job, action) for action in actions), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Refused):
                raise failure
        return next((failure for failure in failures if isinstance(failure, Refused)), None)

    async def _one(self, job: Job, action: Action) -> None:
        match action:
            case CreateClaim():
                await self._create_claim(job, action)
            case CreateService():
                await self._create_service(job, action)
            case PointService():
                await self._point_service(job, action)
            case CreatePod():
                await self._create_pod(job, action)
            case DeletePod():
                await self._delete_pod(job, action)

    async def _create_claim(self, job: Job, action: CreateClaim) -> None:
        collection = paths.claims(job.namespace)
        try:
            await self._create(collection, "persistentvolumeclaims", action.manifest)
        except ApiError as error:
            if not error.already_exists:
                raise
            # A claim that is kept outlives its job on purpose, so one of that name is taken over whoever made it.
        self.cache.memory(_owner(job)).claim_exists = True

    async def _create_service(self, job: Job, action: CreateService) -> None:
        collection, name = paths.services(job.namespace), action.manifest["metadata"]["name"]
        try:
            service = await self._create(collection, "services", action.manifest)
        except ApiError as error:
            if not error.already_exists:
                raise
            service = await self.client.get(f"{collection}/{name}", "services")
            if owner_of(service) != _owner(job):
                raise Refused(_taken("Service", service)) from None
        self.cache.put_service(_owner(job), service)

    async def _point_service(self, job: Job, action: PointService) -> None:
        path = f"{paths.services(job.namespace)}/{action.name}"
        try:
            service = await self.client.merge_patch(path, "services", {"spec": {"selector": action.selector}})
        except ApiError as error:
            if not error.not_found:
                raise
            # Somebody deleted it: the next look creates it anew, with the selector that it needs now.
            self.cache.memory(_owner(job)).service = None
        else:
            self.cache.put_service(_owner(job), service)

    async def _create_pod(self, job: Job, action: CreatePod) -> None:
        collection = paths.pods(job.namespace)
        try:
            pod = await self._create(collection, "pods", action.manifest)
        except ApiError as error:
            if not error.already_exists:
                raise
            pod = await self.client.get(f"{collection}/{action.name}", "pods")
            if owner_of(pod) != _owner(job):
                raise Refused(_taken("Pod", pod)) from None
        self.cache.put_pod(pod)

    async def _delete_pod(self, job: Job, action: DeletePod) -> None:
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": action.uid},
        }
        if action.grace_seconds is not None:
            body["gracePeriodSeconds"] = action.grace_seconds
        try:
            pod = await self.client.delete(f"{paths.pods(job.namespace)}/{action.name}", "pods", body)
        except ApiError as error:
            if not (error.not_found or (error.conflict and await self._is_replaced(job, action))):
                raise
            self.cache.forget_pod(action.uid)
            return
        if pod.get("kind") == "Pod" and "deletionTimestamp" in pod["metadata"]:
            self.cache.put_pod(pod)
        else:
            self.cache.forget_pod(action.uid)

    async def _is_replaced(self, job: Job, action: DeletePod) -> bool:
        """Whether the pod of that name is another one, which a 409 can mean, but need not."""
        try:
            pod = await self.client.get(f"{paths.pods(job.namespace)}/{action.name}", "pods")
        except ApiError as error:
            if error.not_found:
                return True
            raise
        self.cache.put_pod(pod)
        return bool(pod["metadata"]["uid"] != action.uid)

    async def _create(self, collection: str, resource: str, manifest: Json) -> Json:
        try:
            return await self.client.create(collection, resource, manifest)
        except ApiError as error:
            if error.already_exists or not _refuses(error):
                raise
            raise Refused(problem_of(manifest, error), final=error.namespace_terminating or error.not_found) from error


def problem_of(manifest: Json, error: ApiError) -> Problem:
    """A refusal in words for people: which object, why, in the API server's own terms."""
    what = f"{manifest['kind']} {manifest['metadata']['name']}"
    return Problem(_reason(error), f"the API server refused {what}: {error.message}")


def _reason(error: ApiError) -> str:
    if error.namespace_terminating:
        return "NamespaceTerminating"
    if "exceeded quota" in error.message:
        return "QuotaExceeded"
    if "failed calling webhook" in error.message:
        return "AdmissionFailed"
    if "admission webhook" in error.message:
        return "AdmissionDenied"
    return error.reason or "Refused"


def _refuses(error: ApiError) -> bool:
    return error.status in _REFUSALS or (error.status == 500 and "failed calling webhook" in error.message)


def _taken(kind: str, obj: Json) -> Problem:
    meta = obj["metadata"]
    return Problem(
        "NameTaken",
        f"{kind} {meta['name']} exists already and is not of this job; "
        "delete it, or wait until the deletion of its own job removes it",
    )


def _owner(job: Job) -> Owner:
    return Owner(job.namespace, job.uid)
