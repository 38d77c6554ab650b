"""How often what is listed, where one namespace cannot be read."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from aiohttp import web
from tests.unit.answers import Server
from tests.unit.virtual_time import VirtualTimeLoop, run

from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.cluster.resync import Resync
from ddpjob_operator.runtime.client import Client, Page
from ddpjob_operator.runtime.errors import ApiError


class Lists:
    """Stands for the API server's lists, so that time can be virtual; those of the namespace `gone` are forbidden."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.found: dict[str, list[Page]] = {}

    async def pages(self, path: str, resource: str, *_: Any, **__: str) -> AsyncIterator[Page]:
        namespace = path.split("/namespaces/")[1].split("/")[0]
        if resource == "pods":
            self.asked.append(namespace)
        if namespace == "gone":
            raise ApiError(403, "Forbidden", "no")
        for found in self.found.get(resource, [Page([], 1, first=True)]):
            yield found


def resync(lists: Lists, *namespaces: str) -> Resync:
    def ignore(keys: Iterable[Key]) -> None:
        pass

    return Resync(lists, Cache(), namespaces, 300.0, ignore)  # type: ignore[arg-type]


async def listed(lists: Lists, *namespaces: str, seconds: float) -> Resync:
    found = resync(lists, *namespaces)
    task = asyncio.create_task(found.run())
    await asyncio.sleep(seconds)
    task.cancel()
    return found


def test_a_namespace_that_cannot_be_read_is_tried_soon_again_and_the_others_in_their_time() -> None:
    lists = Lists()
    found = run(listed(lists, "gone", "research", seconds=1000))
    assert lists.asked.count("research") in (3, 4)  # at 0, and then every 270 to 330 s
    assert lists.asked.count("gone") > 20
    assert found.healthy
    assert found.first_done.is_set()


@pytest.mark.fault(6)
def test_two_minutes_of_refused_lists_are_survived_without_a_storm() -> None:
    class Down(Lists):
        async def pages(self, path: str, resource: str, *given: Any, **options: str) -> AsyncIterator[Page]:
            async for found in super().pages(path, resource, *given, **options):
                if asyncio.get_running_loop().time() < 120:
                    raise ApiError(503, "ServiceUnavailable", "no")
                yield found

    lists = Down()
    found = run(listed(lists, "research", seconds=160))
    assert found.healthy
    assert found.first_done.is_set()
    assert 5 <= lists.asked.count("research") <= 15


def test_one_that_can_read_nothing_is_not_healthy_and_decides_nothing() -> None:
    found = run(listed(Lists(), "gone", seconds=1000))
    assert not found.healthy
    assert not found.first_done.is_set()


def test_a_list_that_fails_for_months_leaves_nothing_behind() -> None:
    """Its error is kept until the next round. In a cycle a collection would see it once, and none would after that."""
    refused: list[weakref.ref[ApiError]] = []

    class Kept(Lists):
        async def pages(self, path: str, resource: str, *given: Any, **options: str) -> AsyncIterator[Page]:
            try:
                async for found in super().pages(path, resource, *given, **options):
                    yield found
            except ApiError as error:
                refused.append(weakref.ref(error))
                raise

    async def scenario() -> list[str | None]:
        failed = await resync(Kept(), "gone").once(("gone",))
        assert "no" in str(failed["gone"])
        return list(failed)

    gc.collect()
    gc.disable()
    try:
        assert run(scenario()) == ["gone"]
        assert [ref() for ref in refused] == [None, None], "of jobs and of pods"
    finally:
        gc.enable()


def test_a_replica_that_begins_to_lead_decides_nothing_before_it_has_listed_anew() -> None:
    async def scenario() -> list[object]:
        lists, seen = Lists(), []
        found = resync(lists, "research")
        found.enqueue = lambda keys: seen.append(found.cache.is_listed("research"))  # type: ignore[assignment]
        task = asyncio.create_task(found.run())
        await asyncio.sleep(10)
        found.start_over()
        trusted = found.cache.is_listed("research")
        await asyncio.sleep(1)
        task.cancel()
        return [trusted, lists.asked.count("research"), seen]

    assert run(scenario()) == [False, 2, [True, True]]


def test_a_list_that_began_before_this_replica_led_does_not_count() -> None:
    """It may be older than what the last leader wrote."""

    class Slow(Lists):
        async def pages(self, path: str, resource: str, *given: Any, **options: str) -> AsyncIterator[Page]:
            async for found in super().pages(path, resource, *given, **options):
                await asyncio.sleep(5)
                yield found

    async def scenario() -> list[bool]:
        found = resync(Slow(), "research")
        task = asyncio.create_task(found.run())
        await asyncio.sleep(3)
        found.start_over()
        await asyncio.sleep(3)
        listed = [found.cache.is_listed("research")]
        await asyncio.sleep(5)
        task.cancel()
        return [*listed, found.cache.is_listed("research")]

    assert run(scenario()) == [False, True]


OWNER = Owner("research", "job-1")


def pod(number: int, version: int = 5) -> dict[str, Any]:
    owner = {"kind": "DDPJob", "name": "digits", "uid": "job-1", "controller": True}
    names = {"name": f"digits-0-{number}", "namespace": "research", "uid": f"pod-{number}"}
    return {"metadata": {**names, "resourceVersion": str(version), "ownerReferences": [owner]}, "status": {}}


def names(cache: Cache) -> set[str]:
    return {view.name for view in cache.observed(OWNER).pods}


def test_pages_add_up_to_one_list_and_what_an_expired_one_had_is_void() -> None:
    lists = Lists()
    found = resync(lists, "research")
    found.cache.put_pod(pod(9))
    pages = [([1, 9], True), ([2], True), ([3], False)]
    lists.found["pods"] = [Page([pod(number, 6) for number in numbers], 7, first) for numbers, first in pages]
    run(found.once(("research",)))
    assert names(found.cache) == {"digits-0-2", "digits-0-3"}


def test_a_watch_begins_where_a_list_ended_and_the_next_one_has_everything_listed_anew() -> None:
    """A watch that has lost its place cannot tell what was deleted meanwhile: nothing waits for the next round."""
    path = "/api/v1/namespaces/research/pods"

    async def scenario() -> list[object]:
        lists = Lists()
        lists.found["pods"] = [Page([pod(1)], 7, first=True)]
        found = resync(lists, "research")
        task = asyncio.create_task(found.run())
        await asyncio.sleep(1)
        began = found.watch_from(f"/k8s/clusters/c{path}")
        lists.found["pods"] = [Page([], 8, first=True)]
        await asyncio.sleep(1)
        before = names(found.cache)
        again = found.watch_from(path)
        await asyncio.sleep(1)
        task.cancel()
        return [began, before, again, names(found.cache), found.watch_from(path)]

    assert run(scenario()) == [7, {"digits-0-1"}, None, set(), 8]


async def test_a_large_list_is_never_in_memory_as_a_whole(server: Server, client: Client) -> None:
    """Of 500 pods of 10 kB, which take 150 kB each while they are decoded."""
    managed = [{"manager": "kubelet", "fieldsV1": {f"f:{number}": {"f:x": {}} for number in range(500)}}]
    text = json.dumps(pod(0) | {"spec": {"managed": managed}}).replace('-0"', '-%d"')

    async def answer(request: web.Request) -> web.Response:
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        last = min(first + limit, 500)
        more = {"continue": str(last)} if last < 500 else {}
        pods = (text % (number, number) for number in range(first, last) if request.path.endswith("pods"))
        metadata = json.dumps({"resourceVersion": "9", **more})
        return web.Response(text=f'{{"metadata": {metadata}, "items": [{",".join(pods)}]}}')

    server.answers = [answer]
    found = Resync(client, Cache(), ("research",), 300.0, lambda keys: None)
    tracemalloc.start()
    try:
        assert await found.once(("research",)) == {}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(names(found.cache)) == 500
    assert peak < 45e6


def test_a_round_of_lists_is_not_made_twice_by_a_loop_whose_timers_are_early() -> None:
    """uvloop's have whole milliseconds: half of them end up to half a millisecond before their time."""

    class WholeMilliseconds(VirtualTimeLoop):
        def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            return super().call_at(round(when, 3), *args, **options)

    class Timed(Lists):
        async def pages(self, path: str, resource: str, *given: Any, **options: str) -> AsyncIterator[Page]:
            await asyncio.sleep(0.01)
            async for found in super().pages(path, resource, *given, **options):
                yield found

    lists = Timed()
    with asyncio.Runner(loop_factory=WholeMilliseconds) as runner:
        runner.run(listed(lists, "research", seconds=30_000))
    assert 30_000 / 330 <= lists.asked.count("research") <= 1 + 30_000 / 270


def test_a_list_that_takes_long_is_not_begun_again_beside_itself() -> None:
    class Slow(Lists):
        at_once = most = 0

        async def pages(self, path: str, resource: str, *given: Any, **options: str) -> AsyncIterator[Page]:
            if resource == "ddpjobs":
                raise ApiError(429, "TooManyRequests", "no")
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                await asyncio.sleep(60)
                yield Page([], 1, first=True)
            finally:
                self.at_once -= 1

    lists = Slow()
    run(listed(lists, "research", seconds=120))
    assert lists.most == 1
