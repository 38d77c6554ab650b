"""How often what is listed, where one namespace cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from tests.unit.virtual_time import run

from ddpjob_operator.cluster.cache import Cache, Key
from ddpjob_operator.cluster.resync import Resync
from ddpjob_operator.runtime.errors import ApiError


class Lists:
    """Stands for the API server's lists, so that time can be virtual; those of the namespace `gone` are forbidden."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def list(self, path: str, resource: str, **_: str) -> tuple[list[dict[str, Any]], int]:
        namespace = path.split("/namespaces/")[1].split("/")[0]
        if resource == "pods":
            self.asked.append(namespace)
        if namespace == "gone":
            raise ApiError(403, "Forbidden", "no")
        return [], 1


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
        async def list(self, path: str, resource: str, **options: str) -> tuple[list[dict[str, Any]], int]:
            answer = await super().list(path, resource, **options)
            if asyncio.get_running_loop().time() < 120:
                raise ApiError(503, "ServiceUnavailable", "no")
            return answer

    lists = Down()
    found = run(listed(lists, "research", seconds=160))
    assert found.healthy
    assert found.first_done.is_set()
    assert 5 <= lists.asked.count("research") <= 15


def test_one_that_can_read_nothing_is_not_healthy_and_decides_nothing() -> None:
    found = run(listed(Lists(), "gone", seconds=1000))
    assert not found.healthy
    assert not found.first_done.is_set()


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
        async def list(self, path: str, resource: str, **options: str) -> tuple[list[dict[str, Any]], int]:
            answer = await super().list(path, resource, **options)
            await asyncio.sleep(5)
            return answer

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
