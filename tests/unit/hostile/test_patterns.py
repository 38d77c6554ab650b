"""The patterns of a tenant cost the event loop nothing but the compilation of one of them at a time."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import re2

from ddpjob_operator.api.validation import PATTERN_OPTIONS, _compile_error
from ddpjob_operator.cluster import controller as cluster
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.controller import Controller
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.cluster.status_poll import StatusPoller
from ddpjob_operator.core.failure.symptoms import _compiled, found
from ddpjob_operator.core.values.actions import Plan
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.events import EventRecorder
from ddpjob_operator.wire.jobs import has_patterns

SECONDS = 0.1
KEY = Key("tenant", "digits")
SLOW_TO_COMPILE = [r"(?:[^\pL]){0}" * 38 + "x" * number for number in range(1, 18)]
SLOW_TO_MATCH = [f"(a?){{200}}a{{{number}}}b" for number in range(191, 201)]
TEXT = "\u00e9" * 4096


def job(*patterns: str) -> dict[str, Any]:
    rules = [{"action": "Restart", "messagePattern": pattern} for pattern in patterns]
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "uid": "u", "resourceVersion": "1", "generation": 1}
    return {"metadata": metadata, "spec": {"nodes": 1, "restart": {"rules": rules}}}


def controller(client: Client, obj: dict[str, Any]) -> Controller:
    cache = Cache()
    cache.put_job(obj)
    return Controller(
        client=client,
        cache=cache,
        recorder=EventRecorder(client, "here"),
        defaults=lambda _: Defaults(),
        progress_seconds=1.0,
        enqueue=lambda _: None,
        poller=StatusPoller(),
        leader=None,
    )


class Spent:
    """Processor time of the event loop's thread and of the whole process."""

    def __enter__(self) -> Spent:
        self._began = time.thread_time(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop = time.thread_time() - self._began[0]
        self.process = time.process_time() - self._began[1]


async def test_patterns_are_compiled_and_matched_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched: list[bool] = []

    def plan(*_: Any) -> Plan:
        matched.extend(found(pattern, TEXT) for pattern in SLOW_TO_MATCH)
        raise LookupError

    monkeypatch.setattr(cluster, "plan", plan)
    _compile_error.cache_clear()
    _compiled.cache_clear()
    with Spent() as compiling:
        view = await controller(client, job(*SLOW_TO_COMPILE))._view(KEY)
    assert view is not None
    assert view.problems == ()
    hostile = controller(client, job(*SLOW_TO_MATCH))
    view = await hostile._view(KEY)
    assert view is not None
    with Spent() as matching, pytest.raises(LookupError):
        await hostile._decide(view)
    assert matched == [False] * len(SLOW_TO_MATCH)
    assert compiling.loop < SECONDS
    assert matching.loop < SECONDS
    assert matching.process > SECONDS, "they are slow enough to be a test"


async def test_a_second_look_at_the_same_spec_compiles_nothing(client: Client) -> None:
    again = controller(client, job(*(f"CUDA error {number}" for number in range(32))))
    await again._view(KEY)
    before = _compile_error.cache_info()
    await again._view(KEY)
    after = _compile_error.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (0, 32)


@pytest.mark.parametrize(
    "pattern", [SLOW_TO_COMPILE[0], r"[^\pL]" * 80, r"\pL+" * 128, r"(?i)\pL" * 70, "((a{10}){10}){10}", r"\w" * 256]
)
def test_one_pattern_compiles_within_a_moment(pattern: str) -> None:
    """While it does, no other thread runs."""
    began = time.thread_time()
    with suppress(re2.error):
        re2.compile(pattern + "z", PATTERN_OPTIONS)
    assert time.thread_time() - began < SECONDS


@pytest.mark.parametrize(
    ("obj", "wanted"),
    [
        (job("a"), True),
        (job(), False),
        ({}, False),
        ({"spec": None}, False),
        ({"spec": {"restart": []}}, False),
        ({"spec": {"restart": {"rules": {"messagePattern": "a"}}}}, False),
        ({"spec": {"restart": {"rules": [None, {"action": "Fail"}, {"messagePattern": "a"}]}}}, True),
    ],
)
def test_any_object_may_be_asked_for_patterns(obj: dict[str, Any], wanted: bool) -> None:
    assert has_patterns(obj) is wanted
