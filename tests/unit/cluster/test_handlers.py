"""Which job is looked at after an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import kopf
import pytest

from ddpjob_operator.api import PLURAL
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.values.names import FINALIZER, job_labels
from ddpjob_operator.runtime.queue import WorkQueue
from ddpjob_operator.shards import Shard
from ddpjob_operator.watching import handlers

Handlers = dict[str, Callable[..., Any]]


class Recording(WorkQueue[Key]):
    """The keys that are added."""

    def __init__(self) -> None:
        self.added: list[Key] = []

    def add(self, key: Key) -> None:
        self.added.append(key)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> tuple[Handlers, Recording]:
    """The handlers by what they are of, and what they add to the queue."""
    found: Handlers = {}

    def event(*what: str, **_: Any) -> Callable[..., Any]:
        return lambda handler: found.setdefault(what[-1], handler)

    monkeypatch.setattr(kopf.on, "event", event)
    queue = Recording()
    handlers.register(kopf.OperatorRegistry(), Cache(), queue, Shard())
    return found, queue


def test_a_pod_that_was_orphaned_leads_to_its_job_whose_name_is_no_label(
    registered: tuple[Handlers, Recording],
) -> None:
    found, queue = registered
    job = {"metadata": {"name": "digits.v2", "namespace": "ns", "uid": "job-1", "resourceVersion": "4"}}
    labels = job_labels("digits.v2", "job-1") | {
        "training.ddpjob.io/attempt": "0",
        "training.ddpjob.io/node-rank": "0",
    }
    pod = {
        "metadata": {
            "name": "digits-0-0", "namespace": "ns", "uid": "pod-1", "resourceVersion": "6", "labels": labels,
            "finalizers": [FINALIZER],
        },
        "status": {"phase": "Running"},
    }  # fmt: skip
    asyncio.run(found[PLURAL](event={"type": "ADDED", "object": job}))
    asyncio.run(found["pods"](event={"type": "ADDED", "object": pod}))
    assert queue.added == [Key("ns", "digits.v2"), Key("ns", "digits.v2")]
