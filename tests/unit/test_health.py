"""What the operator says of itself: what only a new process mends, and what keeps it from acting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_operator.main import Operator
from ddpjob_operator.shards import Shard
from ddpjob_operator.watching import framework

WATCHES = sorted(framework.expected_watches(("research",)))


def operator(
    *,
    dead_workers: int = 0,
    longest_pass: float = 0.0,
    listed: bool = True,
    last_list: bool = True,
    leader: bool | None = True,
    watching: bool = True,
) -> Operator:
    """One whose parts are as the arguments say. `leader`: whether it is known who leads; None without an election."""
    parts: dict[str, Any] = dict.fromkeys(("cache", "controller", "child_watch", "recorder"))
    return Operator(
        **parts,
        namespaces=("research",),
        watches=framework.Watches(("research",)),
        shard=Shard(),
        queue=SimpleNamespace(dead_workers=lambda: dead_workers, longest_pass=lambda: longest_pass),  # type: ignore[arg-type]
        resync=SimpleNamespace(first_done=event(listed), healthy=last_list),  # type: ignore[arg-type]
        leader=None if leader is None else SimpleNamespace(known=event(leader)),  # type: ignore[arg-type]
        watching=watching,
    )


def event(is_set: bool) -> asyncio.Event:
    found = asyncio.Event()
    if is_set:
        found.set()
    return found


@pytest.mark.parametrize(
    ("parts", "alive", "said"),
    [
        ({}, WATCHES, []),
        ({}, WATCHES[1:], [f"{WATCHES[0]}: has ended"]),
        ({"watching": False}, [], []),
        ({"dead_workers": 2}, WATCHES, ["2 workers of the queue have ended"]),
        ({"longest_pass": 299.0}, WATCHES, []),
        ({"longest_pass": 301.4}, WATCHES, ["a look at a job has shown no sign of life for 301 s"]),
        ({"listed": False, "last_list": False, "leader": False}, WATCHES, []),
    ],
)
async def test_what_only_a_new_process_mends_is_unhealthy(
    parts: dict[str, Any], alive: list[str], said: list[str]
) -> None:
    watches = [asyncio.create_task(asyncio.sleep(60), name=name) for name in alive]
    assert operator(**parts).unhealthy() == said
    for watch in watches:
        watch.cancel()


async def test_a_watch_that_ends_later_is_dead_until_another_has_taken_its_place() -> None:
    found = operator()
    watches = {name: asyncio.create_task(asyncio.sleep(60), name=name) for name in WATCHES}
    assert found.watches.dead() == []
    ended = watches[WATCHES[0]]
    ended.cancel()
    await asyncio.wait([ended])
    assert found.watches.dead() == WATCHES[:1]
    watches[WATCHES[0]] = asyncio.create_task(asyncio.sleep(60), name=WATCHES[0])
    assert found.watches.dead() == []
    for watch in watches.values():
        watch.cancel()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, []),
        ({"listed": False, "last_list": False}, ["jobs and pods have not been listed yet"]),
        ({"last_list": False}, ["the last list of jobs and pods failed"]),
        ({"leader": False}, ["it is not known yet who leads"]),
        ({"leader": None}, []),
        ({"watching": False}, ["the watches have not begun yet"]),
        ({"dead_workers": 2, "longest_pass": 301.0}, []),
    ],
)
async def test_what_keeps_it_from_acting_is_unready(parts: dict[str, Any], said: list[str]) -> None:
    assert operator(**parts).unready() == said
