"""`ddpjob drain-node`: cordon a Kubernetes node, evict the pods of DDPJobs on it, and wait until they are gone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import quote

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED
from ddpjob_operator.cli.terminal import print_note
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.draining import (
    Held,
    OnNode,
    Owner,
    drained_in_words,
    eviction_version,
    interrupted_in_words,
    missing_rights_in_words,
    on_node,
    others_in_words,
    refusal_in_words,
    still_there_in_words,
    uncordon_in_words,
    unreadable_in_words,
    what_follows,
)
from ddpjob_operator.follow.outage import is_passing
from ddpjob_operator.follow.read import read_pods_on
from ddpjob_operator.local.observed import seconds_in_words
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import collection
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 2.0
"""Also between two tries of an eviction that is refused, for which kubectl waits 5 s."""
_REVIEWS = collection("authorization.k8s.io/v1", "selfsubjectaccessreviews", None)
_FORBIDDEN, _CONFLICT, _SERVER_ERROR = 403, 409, 500


def drain_node(cluster: Cluster, node: str, limit: int, *, dry_run: bool) -> int:
    """Drain it within so many seconds; with `dry_run`, say what that would do."""

    async def ask(client: Client, _: str) -> int:
        draining = Draining(client, node)
        try:
            return await draining.foretell() if dry_run else await draining.drain(limit)
        except asyncio.CancelledError:  # Ctrl-C
            print(interrupted_in_words(node, draining.evicted) if draining.cordoned else "nothing was changed")
            raise
        except ApiError:
            if draining.cordoned:
                print_note(f"{node} stays cordoned; {uncordon_in_words(node)}")
            raise

    return asked(cluster, ask)


@dataclass(eq=False)
class Draining:
    """One drain of one node."""

    client: Client
    node: str
    cordoned: bool = False
    """Whether the node is cordoned, or may be: it was asked for."""
    evicted: dict[str, None] = field(default_factory=dict)
    """The pods for which the eviction was asked and not refused, in order."""
    _refusals: dict[str, str] = field(default_factory=dict)
    """Why pods cannot be evicted now, by their uid."""
    _known: set[Owner] = field(default_factory=set)
    """The jobs of which something was said."""
    _version: str = ""
    """Of an Eviction, once it was asked for."""

    async def foretell(self) -> int:
        """What a drain would do."""
        was_cordoned, found = await self._is_cordoned(), await self._look()
        lines = [*await self._new_jobs(found), *others_in_words(found, self.node)]
        await self._check_rights(found, was_cordoned)
        print(f"{self.node} is cordoned already" if was_cordoned else f"{self.node} would be cordoned")
        _print(lines)
        evicted = sum(not pod.view.deleting for pod in found.held)
        print(f"{evicted} {'pod' if evicted == 1 else 'pods'} would be evicted; nothing was changed (--dry-run)")
        return SUCCEEDED

    async def drain(self, limit: int) -> int:
        """Cordon, evict, wait."""
        was_cordoned, found = await self._is_cordoned(), await self._look()
        lines = [*await self._new_jobs(found), *others_in_words(found, self.node)]
        await self._check_rights(found, was_cordoned)
        await self._cordon(was_cordoned)
        _print(lines)
        try:
            async with asyncio.timeout(limit):
                await self._until_empty()
        except TimeoutError:
            return await self._give_up(limit)
        _print(drained_in_words(self.node, found_any=bool(self._known)))
        return SUCCEEDED

    async def _until_empty(self) -> None:
        """Evict what is there until nothing is. The scheduler may have bound a pod just before the node was cordoned,
        so each round looks anew."""
        waiting, said = -1, ""
        while True:
            try:
                found = await self._look()
                _print(await self._new_jobs(found))
                if not found.held:
                    return
                await self.evict([pod for pod in found.held if not pod.view.deleting])
                if len(found.held) != waiting:
                    waiting = len(found.held)
                    print_note(f"waiting for {waiting} {'pod' if waiting == 1 else 'pods'} to end")
            except ApiError as error:
                if not is_passing(error):
                    raise
                if error.message != said:
                    said = error.message
                    print_note(f"{said}; trying again")
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _give_up(self, limit: int) -> int:
        """Say what is still there, and why."""
        found, now = await self._look(), datetime.now(UTC)
        left = [pod for pods in found.by_owner().values() for pod in pods]
        if not left:  # gone at the last moment
            _print(drained_in_words(self.node, found_any=True))
            return SUCCEEDED
        are = "pod of a DDPJob is" if len(left) == 1 else "pods of DDPJobs are"
        print(f"error: {len(left)} {are} still on {self.node} after {seconds_in_words(limit)}", file=sys.stderr)
        for pod in left:
            print(f"  {still_there_in_words(pod, self._refusals.get(pod.view.uid), now)}", file=sys.stderr)
        print(f"{self.node} stays cordoned; the same command goes on; {uncordon_in_words(self.node)}")
        return FAILED

    async def _is_cordoned(self) -> bool:
        if not self.node:
            raise ApiError(404, "NotFound", "NODE is empty; kubectl get nodes lists the names")
        try:
            node = await self._allowed(self.client.get(_path_of(self.node), "nodes"), "get nodes")
        except ApiError as error:
            if not error.not_found:
                raise
            problem = f"there is no Kubernetes node {self.node}; kubectl get nodes lists them"
            raise ApiError(404, "NotFound", problem) from None
        return bool((node.get("spec") or {}).get("unschedulable"))

    async def _cordon(self, already: bool) -> None:
        if already:
            self.cordoned = True
            print(f"{self.node} is cordoned already", flush=True)
            return
        body = {"spec": {"unschedulable": True}}
        try:
            self.cordoned = True
            await self.client.strategic_merge_patch(_path_of(self.node), "nodes", body)
        except ApiError as error:
            self.cordoned = error.status == 0 or error.status >= _SERVER_ERROR  # it may have been done
            raise self._no_right(["patch nodes"]) if error.status == _FORBIDDEN else error from None
        print(f"{self.node} is cordoned", flush=True)

    async def _look(self) -> OnNode:
        return on_node(await self._allowed(read_pods_on(self.client, self.node), "list pods in all namespaces"))

    async def _new_jobs(self, found: OnNode) -> list[str]:
        """One line for each job that has had none yet."""
        new = {owner: pods for owner, pods in found.by_owner().items() if owner not in self._known}
        lines = [f"{owner}: {await self._what_follows(owner, pods)}" for owner, pods in new.items()]
        self._known.update(new)
        return lines

    async def _what_follows(self, owner: Owner, pods: Sequence[Held]) -> str:
        try:
            return what_follows(await self._job(owner), pods)
        except InvalidJob:
            return unreadable_in_words(pods)

    async def _job(self, owner: Owner) -> Job | None:
        """None if it is gone, whatever has its name now."""
        reading = self.client.get(f"{paths.jobs(owner.namespace)}/{owner.name}", "ddpjobs")
        try:
            found = await self._allowed(reading, f"get ddpjobs in namespace {owner.namespace}")
        except ApiError as error:
            if error.not_found:
                return None
            raise
        return parse_job(found) if found["metadata"]["uid"] == owner.uid else None

    async def evict(self, pods: Sequence[Held]) -> None:
        """Ask for the eviction of all at once: ranks of one job that go together leave in one step.

        Raises:
            ApiError: the API server refuses one for good, or does not answer.
        """
        if pods and not self._version:
            core = await self.client.get("/api/v1", "")
            self._version = eviction_version(core.get("resources") or ())
        answers = await asyncio.gather(*map(self._evict_one, pods))
        for error in filter(None, answers):
            raise error

    async def _evict_one(self, pod: Held) -> ApiError | None:
        """What the API server refuses for good. What it refuses for now is said, and tried again."""
        owner, view = pod.owner, pod.view
        body = {
            "apiVersion": self._version,
            "kind": "Eviction",
            "metadata": {"name": view.name, "namespace": owner.namespace},
            # a live job's new pod has the name of the one that it replaces
            "deleteOptions": {"preconditions": {"uid": view.uid}},
        }
        path = f"{paths.pods(owner.namespace)}/{view.name}/eviction"
        self.evicted[str(pod)] = None
        try:
            await self.client.create(path, "pods/eviction", body)
        except ApiError as error:
            if error.not_found or error.status == _CONFLICT:  # gone, or another pod: the next look says so
                return None
            if error.status == 0:  # it may have been done
                return error
            self.evicted.pop(str(pod), None)
            if not is_passing(error) and not error.namespace_terminating:
                right = f"create pods/eviction in namespace {owner.namespace}"
                return self._no_right([right]) if _is_missing_right(error) else error
            refusal = refusal_in_words(error.message, error.details)
            if self._refusals.get(view.uid) != refusal:
                self._refusals[view.uid] = refusal
                print_note(f"{pod} cannot be evicted now: {refusal}; trying again")
        return None

    async def _check_rights(self, found: OnNode, was_cordoned: bool) -> None:
        """Before anything is changed: whether the caller may do all of it.

        Raises:
            ApiError: with every right that is missing.
        """
        spaces = sorted({pod.owner.namespace for pod in found.held if not pod.view.deleting})
        wanted = {f"create pods/eviction in namespace {space}": _may_evict(space) for space in spaces}
        if not was_cordoned:
            wanted = {"patch nodes": {"verb": "patch", "resource": "nodes", "name": self.node}} | wanted
        answers = await asyncio.gather(*map(self._may, wanted.values()))
        if missing := [right for right, allowed in zip(wanted, answers, strict=True) if not allowed]:
            raise self._no_right(missing)

    async def _may(self, attributes: dict[str, str]) -> bool:
        spec = {"resourceAttributes": attributes}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        try:
            answer = await self.client.create(_REVIEWS, "selfsubjectaccessreviews", body)
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise
            return True  # who may not ask finds out
        return bool((answer.get("status") or {}).get("allowed"))

    async def _allowed(self, call: Awaitable[T], right: str) -> T:
        """What a read returns.

        Raises:
            ApiError: it was refused; without the right, the message names it.
        """
        try:
            return await call
        except ApiError as error:
            raise self._no_right([right]) if error.status == _FORBIDDEN else error from None

    def _no_right(self, rights: Sequence[str]) -> ApiError:
        return ApiError(_FORBIDDEN, "NoRight", missing_rights_in_words(rights, cordoned=self.cordoned))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _path_of(node: str) -> str:
    return f"{collection('v1', 'nodes', None)}/{quote(node, safe='')}"


def _may_evict(namespace: str) -> dict[str, str]:
    return {"verb": "create", "resource": "pods", "subresource": "eviction", "namespace": namespace}


def _is_missing_right(error: ApiError) -> bool:
    return error.status == _FORBIDDEN and error.reason == "Forbidden" and "cannot" in error.message and not error.denied
