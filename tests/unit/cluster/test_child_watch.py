"""The watches of children: what is asked how often, and what is known where one is not allowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.child_watch import ChildWatch
from ddpjob_operator.cluster.children import CLAIM, POLICY, SERVICE, Kind
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.core.values.names import LABEL_JOB
from ddpjob_operator.metrics import WATCH_STARTS
from ddpjob_operator.runtime.client import WATCH_SECONDS, Page
from ddpjob_operator.runtime.errors import ApiError

KEY, OWNER = Key("ns", "digits"), Owner("ns", "job-1")
JOB = {"metadata": {"name": "digits", "namespace": "ns", "uid": "job-1", "resourceVersion": "4"}}


def policy(version: int) -> dict[str, Any]:
    owner = {"kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}
    metadata = {"name": "digits", "namespace": "ns", "uid": "policy-1", "resourceVersion": str(version)}
    return {"metadata": metadata | {"ownerReferences": [owner]}}


class Server:
    """Stands for the API server, so that time can be virtual. Only policies exist, unless they may not be read."""

    def __init__(self, events: list[tuple[float, dict[str, Any]]], refusal: ApiError | None = None) -> None:
        self.events = events
        self.refusal = refusal
        self.lists = 0
        self.watches: list[int] = []

    async def pages(self, path: str, resource: str, page: int, **_: str) -> AsyncIterator[Page]:
        if resource != "networkpolicies":
            raise ApiError(404, "NotFound", "no such kind")
        self.lists += 1
        if self.refusal is not None:
            raise self.refusal
        yield Page([policy(5)], 10, first=True)

    async def watch(self, path: str, version: int, **_: str) -> AsyncIterator[dict[str, Any]]:
        self.watches.append(version)
        ends = asyncio.get_running_loop().time() + WATCH_SECONDS
        while self.events:
            at, event = self.events.pop(0)
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            if event["type"] == "ERROR":
                raise ApiError(410, "Expired", "too old")
            yield event
        await asyncio.sleep(ends - asyncio.get_running_loop().time())


async def watched(server: Server, seconds: float) -> tuple[Cache, list[Key]]:
    cache, looked = Cache(), list[Key]()
    cache.put_job(JOB)
    found = ChildWatch(server, cache, ("ns",), 300.0, lambda key, after: looked.append(key))  # type: ignore[arg-type]
    task = asyncio.create_task(found.run())
    await asyncio.wait_for(found.tried.wait(), 1)
    await asyncio.sleep(seconds)
    task.cancel()
    return cache, looked


def test_a_watch_that_has_nothing_to_say_costs_a_request_in_five_minutes() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "70"}}}
    server = Server([(60, bookmark)])
    cache, looked = run(watched(server, 2900))
    assert (server.lists, server.watches, looked) == (1, [10, *[70] * 9], [])
    assert cache.observed(OWNER).children == {("NetworkPolicy", "digits")}, "nobody has asked for it by its name"


def test_a_deletion_has_its_job_looked_at() -> None:
    server = Server([(5, {"type": "DELETED", "object": policy(20)})])
    cache, looked = run(watched(server, 10))
    assert looked == [KEY]
    assert cache.is_lost(OWNER, POLICY, "digits")


def test_a_watch_that_has_lost_its_place_lists_anew() -> None:
    server = Server([(5, {"type": "ERROR"})])
    run(watched(server, 10))
    assert (server.lists, server.watches) == (2, [10, 10])


def test_what_may_not_be_watched_counts_as_unknown_and_is_tried_with_each_resync() -> None:
    """The role of an earlier version: the next pass creates it, or finds it there."""
    server = Server([], ApiError(403, "Forbidden", "no"))
    cache, _ = run(watched(server, 1000))
    assert cache.observed(OWNER).children == frozenset()
    assert server.lists in (4, 5)


@pytest.mark.parametrize(("status", "counted"), [(404, False), (403, True)], ids=["uninstalled", "forbidden"])
def test_a_kind_that_is_uninstalled_is_no_watch_that_has_stopped(status: int, counted: bool) -> None:
    """The alert on watches that have stopped looks at the series of each resource."""
    server = Server([(5, {"type": "ERROR", "object": {}})])

    async def refused_later() -> None:
        asyncio.get_running_loop().call_later(2, setattr, server, "refusal", ApiError(status, "", "no"))
        await watched(server, 10)

    run(refused_later())
    assert (server.lists, len(server.watches)) == (2, 1)
    series = [sample.labels for metric in WATCH_STARTS.collect() for sample in metric.samples]
    assert ({"resource": "networkpolicies", "watched_namespace": "ns"} in series) is counted


def test_why_a_kind_is_not_watched_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ddpjob_operator")
    server = Server([], ApiError(403, "Forbidden", "no"))
    run(watched(server, 1000))
    assert server.lists in (4, 5)
    said = [record.getMessage() for record in caplog.records if "NetworkPolicy" in record.getMessage()]
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("kind", "known"), [(POLICY, False), (Kind("scheduling.volcano.sh/v1beta1", "PodGroup"), True)]
)
def test_of_a_job_that_is_over_only_its_groups_are_known_which_are_to_go(kind: Kind, known: bool) -> None:
    cache, looked_at = Cache(), list[Key]()
    cache.put_job(JOB | {"status": {"phase": "Failed"}})
    found = ChildWatch(Server([]), cache, (), 300.0, lambda key, after: looked_at.append(key))  # type: ignore[arg-type]
    found._put(kind, policy(5))
    assert bool(cache.observed(OWNER).children) is known
    assert looked_at == ([KEY] if known else []), "which deletes it"


@pytest.mark.parametrize(("name", "known"), [("digits-shared", True), ("helper-0-0-scratch", False)])
def test_only_a_claim_of_its_name_is_that_of_a_job(name: str, known: bool) -> None:
    """The labels of an ephemeral volume are in the podTemplate: with those of a job, that would count as having one."""
    cache = Cache()
    cache.put_job(JOB)
    labels = {LABEL_JOB: "digits"}
    metadata = {"name": name, "namespace": "ns", "uid": "claim-1", "resourceVersion": "5", "labels": labels}
    found = ChildWatch(Server([]), cache, (), 300.0, lambda key, after: None)  # type: ignore[arg-type]
    found._put(CLAIM, {"metadata": metadata})
    assert cache.observed(OWNER).pvc_exists is known


def test_a_service_that_copies_the_labels_of_a_pod_is_not_that_of_the_job() -> None:
    """`kubectl expose pod digits-0-0 --cluster-ip=None`: the deletion of the job's own would not be noticed, and the
    next one would get the address None."""
    cache = Cache()
    cache.put_job(JOB)
    metadata = {"namespace": "ns", "uid": "service-1", "resourceVersion": "5", "labels": {LABEL_JOB: "digits"}}
    found = ChildWatch(Server([]), cache, (), 300.0, lambda key, after: None)  # type: ignore[arg-type]
    for name in ("digits-0-0", "digits-rdzv"):
        found._put(SERVICE, {"metadata": metadata | {"name": name}, "spec": {"clusterIP": "None"}})
    assert (cache.observed(OWNER).service_exists, cache.observed(OWNER).address) == (False, "")

    own = policy(6)["metadata"] | {"name": "digits-rdzv"}
    found._put(SERVICE, {"metadata": own, "spec": {"clusterIP": "10.96.0.7"}})
    assert (cache.observed(OWNER).service_exists, cache.observed(OWNER).address) == (True, "10.96.0.7")


def test_a_policy_without_a_controller_is_not_that_of_a_job() -> None:
    cache, copy = Cache(), policy(5)
    cache.put_job(JOB)
    copy["metadata"] |= {"labels": {LABEL_JOB: "digits"}, "ownerReferences": []}
    ChildWatch(Server([]), cache, (), 300.0, lambda key, after: None)._put(POLICY, copy)  # type: ignore[arg-type]
    assert cache.observed(OWNER).children == frozenset()


class OnlyVolcano(Server):
    """No other scheduler is installed."""

    async def pages(self, path: str, resource: str, page: int, **_: str) -> AsyncIterator[Page]:
        if "volcano" not in path:
            raise ApiError(404, "NotFound", "no such kind")
        self.lists += 1
        yield Page([], 10, first=True)


def test_a_scheduler_that_is_not_installed_stops_no_series_of_another_ones_groups() -> None:
    """The alert on watches that have stopped would fire on every cluster with one of them."""

    def begun() -> float:
        return WATCH_STARTS.labels("podgroups", "ns")._value.get()

    before = begun()
    server = OnlyVolcano([])
    run(watched(server, 2900))
    assert len(server.watches) == 10
    assert begun() == before + 10


def test_a_watch_that_is_refused_is_not_the_reason_for_a_storm_of_lists() -> None:
    class Refusing(Server):
        async def watch(self, path: str, version: int, **_: str) -> AsyncIterator[dict[str, Any]]:
            raise ApiError(429, "TooManyRequests", "no")
            yield {}

    server = Refusing([])
    run(watched(server, 120))
    assert 5 <= server.lists <= 15
