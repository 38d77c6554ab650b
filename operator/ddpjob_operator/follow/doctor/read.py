"""Asks the API server for the facts, side by side; what the caller may not read is `Unread`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from ddpjob_operator.api import API_VERSION
from ddpjob_operator.cluster import paths
from ddpjob_operator.follow.doctor.admission import JOBS, PODS, trial_job, trial_pod
from ddpjob_operator.follow.doctor.facts import Facts, Hook, Right, Unread, parse_hooks, parse_node, parse_slice
from ddpjob_operator.follow.doctor.operator import (
    LEASE,
    NEEDED,
    OPERATOR_LABEL,
    USEFUL,
    is_operator,
    lease_name,
    serves,
    trainer_image,
)
from ddpjob_operator.follow.doctor.policies import relevant
from ddpjob_operator.runtime.client import PAGE, Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import collection, events, leases

T = TypeVar("T")

MOST_OBJECTS = 5000
"""Of one kind. What is beyond them is not looked at."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_FAILED = "type=Warning,reason=Failed"
"""Events of a kubelet about a container that cannot be started, as for its image."""
_SLICE_OF = "kubernetes.io/service-name"
_FORBIDDEN = 403


async def read_facts(client: Client, namespace: str) -> Facts:
    """All that the checks are made from.

    Raises:
        ApiError: the API server does not answer, or does not know the caller.
    """
    versions = await _versions(client)
    server_time, local_time = await client.server_time(), datetime.now(UTC)
    ask = _Ask(client, namespace)
    async with asyncio.TaskGroup() as group:
        access = group.create_task(ask.tried(ask.access(), "create selfsubjectaccessreviews"))
        space = group.create_task(ask.tried(ask.space(), "get namespaces"))
        operators = group.create_task(ask.operators())
        jobs = group.create_task(ask.objects(paths.jobs(namespace)))
        classes = group.create_task(ask.objects(collection("storage.k8s.io/v1", "storageclasses", None)))
        nodes = group.create_task(ask.each(parse_node, collection("v1", "nodes", None)))
        claimable = group.create_task(ask.each(parse_slice, collection("resource.k8s.io/v1", "resourceslices", None)))
        pools = group.create_task(ask.each(_name, collection("karpenter.sh/v1", "nodepools", None)))
        quotas = group.create_task(ask.objects(collection("v1", "resourcequotas", namespace)))
        limits = group.create_task(ask.objects(collection("v1", "limitranges", namespace)))
        policies = group.create_task(ask.objects(collection("networking.k8s.io/v1", "networkpolicies", namespace)))
        hooks = group.create_task(ask.hooks())
        failed = group.create_task(ask.each(_message, events(namespace), fieldSelector=_FAILED))
    deployments, operator_leases = operators.result()
    facts = Facts(
        namespace=namespace,
        local_time=local_time,
        server_time=server_time,
        versions=versions,
        access=access.result(),
        space=space.result(),
        deployments=deployments,
        leases=operator_leases,
        jobs=jobs.result(),
        classes=classes.result(),
        nodes=nodes.result(),
        claimable=claimable.result(),
        node_pools=pools.result(),
        quotas=quotas.result(),
        limits=limits.result(),
        policies=policies.result(),
        hooks=hooks.result(),
        endpoints={},
        failed_pulls=failed.result(),
        refusals={},
    )
    endpoints, refusals = await asyncio.gather(ask.endpoints(facts), ask.refusals(trainer_image(facts)))
    return replace(facts, endpoints=endpoints, refusals=refusals)


class _Ask:
    """Reads of one caller in one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client, self._namespace = client, namespace

    async def tried(self, reading: Awaitable[T], right: str) -> T | Unread:
        """What a read returns, or why it cannot be read."""
        try:
            return await reading
        except ApiError as error:
            if error.status == _FORBIDDEN:
                return Unread(
                    f"you have no right to {right}",
                    f"let somebody with that right run: ddpjob doctor -n {self._namespace}",
                )
            return Unread("the cluster does not serve it" if error.not_found else error.message)

    async def objects(self, path: str, **query: str) -> tuple[Json, ...] | Unread:
        """A collection as it is."""
        return await self.each(_whole, path, **query)

    async def each(self, take: Callable[[Json], T], path: str, **query: str) -> tuple[T, ...] | Unread:
        """A collection, page by page: of each object only what `take` makes of it is kept."""
        resource = path.rpartition("/")[2]

        async def read() -> tuple[T, ...]:
            found: list[T] = []
            async for page in self._client.pages(path, resource, PAGE, **query):
                if page.first:
                    found.clear()
                found += map(take, page.items)
                if len(found) >= MOST_OBJECTS:
                    break
            return tuple(found)

        return await self.tried(read(), f"list {resource}")

    async def access(self) -> dict[Right, bool]:
        """What the API server says of each right that `ddpjob submit` takes."""

        async def may(right: Right) -> bool:
            spec = {"resourceAttributes": {"namespace": self._namespace, **right._asdict()}}
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
            answer = await self._client.create(_REVIEWS, "selfsubjectaccessreviews", body)
            return bool((answer.get("status") or {}).get("allowed"))

        rights = (*NEEDED, *USEFUL)
        return dict(zip(rights, await asyncio.gather(*map(may, rights)), strict=True))

    async def space(self) -> Json | None:
        try:
            return await self._client.get(f"/api/v1/namespaces/{self._namespace}", "namespaces")
        except ApiError as error:
            if not error.not_found:
                raise
            return None

    async def operators(self) -> tuple[tuple[Json, ...] | Unread, tuple[Json, ...] | Unread]:
        """Deployments of the operator, and the Leases of those that serve the namespace; of one that runs elsewhere,
        the Leases of the usual name."""
        deployments = await self.objects(collection("apps/v1", "deployments", None), labelSelector=OPERATOR_LABEL)
        if not isinstance(deployments, Unread):
            deployments = tuple(filter(is_operator, deployments))
        if isinstance(deployments, Unread) or not deployments:
            path = collection("coordination.k8s.io/v1", "leases", None)
            return deployments, await self.objects(path, fieldSelector=f"metadata.name={LEASE}")
        serving = [item for item in deployments if serves(item, self._namespace)]
        found = await asyncio.gather(*(self.tried(self._lease(item), "get leases") for item in serving))
        return deployments, tuple(lease for lease in found if not isinstance(lease, Unread))

    async def _lease(self, deployment: Json) -> Json:
        path = leases(deployment["metadata"]["namespace"])
        return await self._client.get(f"{path}/{lease_name(deployment)}", "leases")

    async def hooks(self) -> tuple[Hook, ...] | Unread:
        found: list[Hook] = []
        for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            path = collection("admissionregistration.k8s.io/v1", kind, None)
            each = await self.each(parse_hooks, path)
            if isinstance(each, Unread):
                return each
            found += (hook for hooks in each for hook in hooks)
        return tuple(found)

    async def endpoints(self, facts: Facts) -> dict[tuple[str, str], int | Unread]:
        """How many ready endpoints each Service has whose webhook sees what is created for a job."""
        hooks = () if isinstance(facts.hooks, Unread) else relevant(facts.hooks, facts.space_labels)
        services = list(dict.fromkeys(hook.service for hook in hooks if hook.service is not None))
        return dict(zip(services, await asyncio.gather(*map(self._ready, services)), strict=True))

    async def _ready(self, service: tuple[str, str]) -> int | Unread:
        namespace, name = service
        path = collection("discovery.k8s.io/v1", "endpointslices", namespace)
        found = await self.each(_ready_in, path, labelSelector=f"{_SLICE_OF}={name}")
        return found if isinstance(found, Unread) else sum(found)

    async def refusals(self, image: str | None) -> dict[str, str | Unread]:
        """Of a job, and of its pod, if they were created now."""
        job = self._refusal(paths.jobs(self._namespace), JOBS, trial_job(self._namespace))
        pod = self._refusal(collection("v1", PODS, self._namespace), PODS, trial_pod(self._namespace, image))
        return dict(zip((JOBS, PODS), await asyncio.gather(job, pod), strict=True))

    async def _refusal(self, path: str, resource: str, body: Json) -> str | Unread:
        try:
            await self._client.create(path, resource, body, dry_run=True)
        except ApiError as error:
            if error.lacks_right:
                return Unread(f"you have no right to create {resource}")
            if error.no_dry_run or error.not_found or error.status == 0:
                return Unread(error.message)
            return error.message
        return ""


async def _versions(client: Client) -> tuple[str, ...]:
    """Versions of the DDPJob API, which every caller may ask for."""
    try:
        group = await client.get(f"/apis/{API_VERSION.partition('/')[0]}", "apis")
    except ApiError as error:
        if not error.not_found:
            raise
        return ()
    return tuple(item["version"] for item in group.get("versions") or ())


def _whole(item: Json) -> Json:
    return item


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def _message(event: Json) -> str:
    return str(event.get("message") or event.get("note") or "")


def _ready_in(endpoint_slice: Json) -> int:
    """Endpoints that are ready, or do not say (discovery/v1: then they are to be taken for ready)."""
    conditions: list[Any] = [item.get("conditions") or {} for item in endpoint_slice.get("endpoints") or ()]
    return sum(item.get("ready") is not False for item in conditions)
