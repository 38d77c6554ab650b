"""Kueue's controller of plain pod groups, as far as their pods can tell: who is admitted, held and let go.

After pkg/controller/jobs/pod of kubernetes-sigs/kueue: `Finished`, `FindMatchingWorkloads` and `partitionPods`. A pod
that is being deleted ends a little later, as its kubelet or the pod garbage collector would have it end.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from types import TracebackType
from typing import Self

from tests.api_server.harness import Cluster, Object

from ddpjob_operator.cluster import paths
from ddpjob_operator.core.manifests.pod_group import KUEUE_COUNT, KUEUE_GATE
from ddpjob_operator.core.values.names import KUEUE_GROUP
from ddpjob_operator.runtime.errors import ApiError

FINALIZER = "kueue.x-k8s.io/managed"
MANAGED = {"kueue.x-k8s.io/managed": "true"}
LOOK_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""From the deletion of a pod to its end."""


class PodGroups:
    """Admits the pod groups of a namespace, whose quota has no end, until the block is left."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.open: set[str] = set()
        """Groups that hold quota."""
        self.finished: set[str] = set()
        self.admitted: set[str] = set()
        """UIDs of the pods that may be scheduled. Servers before 1.26 know no gates."""
        self.excess: list[str] = []
        """Pods that were deleted, since their group had as many as it wants."""
        self._known: set[str] = set()
        self._deleted: dict[str, float] = {}
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._look_again_and_again())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        failed = self._watch.done()
        self._watch.cancel()
        [why] = await asyncio.gather(self._watch, return_exceptions=True)
        for pod in await self.cluster.pods():  # else the namespace could not be deleted
            await self._let_go(pod)
        if failed and isinstance(why, Exception):
            raise why from error  # what the block waited for came to nothing since no one admits pods any more

    async def _look_again_and_again(self) -> None:
        while True:
            groups: dict[str, list[Object]] = defaultdict(list)
            for pod in await self.cluster.pods():
                if name := pod["metadata"]["labels"].get(KUEUE_GROUP):
                    groups[name].append(pod)
            for name, pods in groups.items():
                await self._reconcile(name, pods)
            await asyncio.sleep(LOOK_SECONDS)

    async def _reconcile(self, group: str, pods: list[Object]) -> None:
        for pod in pods:
            if pod["metadata"]["uid"] not in self._known and is_new(pod):
                managed = {"finalizers": [*finalizers(pod), FINALIZER], "labels": MANAGED}
                if await self._patch(pod, {"metadata": managed}):
                    self._known.add(pod["metadata"]["uid"])
                return
            if "deletionTimestamp" in pod["metadata"] and not has_ended(pod):
                since = self._deleted.setdefault(pod["metadata"]["uid"], time.monotonic())
                if time.monotonic() - since >= LINGER_SECONDS:
                    await self._patch(pod, {"status": {"phase": "Failed"}}, "/status")
                    return
        count = int(pods[0]["metadata"]["annotations"][KUEUE_COUNT])
        inactive = [pod for pod in pods if not is_runnable(pod)]
        active = [pod for pod in pods if is_runnable(pod)]
        if group not in self.open | self.finished:
            if len(active) < count:
                for pod in inactive:
                    await self._let_go(pod)
                return
            self.open.add(group)
        if group in self.open and is_finished(pods, count):
            self.open.remove(group)
            self.finished.add(group)
        replaced = len(pods) if group in self.finished else max(0, len(pods) - count)
        for pod in sorted(pods if group in self.finished else inactive, key=created)[:replaced]:
            await self._let_go(pod)
        if group in self.open and len(active) > count:
            for pod in sorted(active, key=self._is_waiting_or_new)[count:]:
                self.excess.append(pod["metadata"]["name"])
                await self._let_go(pod)
                await self.cluster.reap(pod["metadata"]["name"])
            return
        for pod in active if group in self.open else ():
            if pod["metadata"]["uid"] not in self.admitted:
                gates = [gate for gate in pod["spec"].get("schedulingGates", ()) if gate["name"] != KUEUE_GATE]
                if await self._patch(pod, {"spec": {"schedulingGates": gates}}):
                    self.admitted.add(pod["metadata"]["uid"])

    def _is_waiting_or_new(self, pod: Object) -> tuple[bool, tuple[str, str]]:
        return pod["metadata"]["uid"] not in self.admitted, created(pod)

    async def _let_go(self, pod: Object) -> None:
        if FINALIZER in finalizers(pod):
            await self._patch(
                pod, {"metadata": {"finalizers": [name for name in finalizers(pod) if name != FINALIZER]}}
            )

    async def _patch(self, pod: Object, change: Object, part: str = "") -> bool:
        """As the pod was seen: what has changed since is looked at again. Returns whether the pod was changed."""
        change.setdefault("metadata", {})["resourceVersion"] = pod["metadata"]["resourceVersion"]
        path = f"{paths.pods(self.cluster.namespace)}/{pod['metadata']['name']}{part}"
        try:
            await self.cluster.client.merge_patch(path, f"pods{part}", change)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return False
        return True


def finalizers(pod: Object) -> list[str]:
    return list(pod["metadata"].get("finalizers") or ())


def created(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]


def has_ended(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Failed", "Succeeded")


def is_new(pod: Object) -> bool:
    """Whether it can be marked as Kueue's webhook would have marked it. A server lets no finalizer be added to a pod
    that is being deleted.
    """
    return not has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def is_runnable(pod: Object) -> bool:
    """`isPodRunnableOrSucceeded`; here a pod has a node when it runs."""
    waits = pod["status"]["phase"] == "Pending"
    return pod["status"]["phase"] != "Failed" and not (waits and "deletionTimestamp" in pod["metadata"])


def is_finished(pods: list[Object], count: int) -> bool:
    """`Finished` of the pod controller."""
    succeeded = sum(pod["status"]["phase"] == "Succeeded" for pod in pods)
    annotations = (pod["metadata"].get("annotations") or {} for pod in pods)
    cannot_be_retried = any(found.get("kueue.x-k8s.io/retriable-in-group") == "false" for found in annotations)
    return succeeded == count or (all(has_ended(pod) for pod in pods) and cannot_be_retried)
