"""How long a parser takes over the worst text of a tenant: in proportion to its length, and no more.

The measure is the processor time of this process for a text and for one that is eight times as long, so that a busy
machine changes nothing. A quadratic parser takes 64 times as long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ddp_trainer.contract.messages import crash_lost_peer, is_telling, no_rendezvous, peer_lost
from ddpjob_operator.core.failure.log_tail import mask
from ddpjob_operator.core.values.names import LABEL_ATTEMPT, LABEL_NODE_RANK
from ddpjob_operator.core.values.trainer_report import read_status, read_termination
from ddpjob_operator.runtime.decode import cut, decode
from ddpjob_operator.wire.jobs import InvalidJob, kept, parse_job
from ddpjob_operator.wire.pods import parse_pod

TIMES = 8
MOST = 24
SHORTEST_SECONDS = 0.002


def job(spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "a", "namespace": "a"}, "spec": spec}


def parsed(spec: dict[str, Any]) -> None:
    with suppress(InvalidJob):
        parse_job(kept(job(spec)))


def template(value: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": value}}


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "opening brackets": (cut, lambda n: b"[" * n),
    "closing brackets": (cut, lambda n: b"]" * n),
    "nested objects": (decode, lambda n: b'{"a":' * n + b"1" + b"}" * n),
    "many deep lists": (decode, lambda n: b"[" + b",".join([b"[" * 300 + b"]" * 300] * (n // 300)) + b"]"),
    "a string of quotes": (cut, lambda n: b'"' + b'\\"' * n),
    "strings that never end": (cut, lambda n: b'"\\' * n),
    "passwords": (mask, lambda n: "passw" * n),
    "credentials and spaces": (mask, lambda n: "credential " * (n // 11) + "="),
    "addresses": (mask, lambda n: "a://" * n),
    "half of a bearer": (mask, lambda n: "Bearer " * (n // 7)),
    "the name of a backend": (peer_lost, lambda n: "gloo\n" * (n // 5)),
    "clients without a number": (no_rendezvous, lambda n: "1" * n),
    "half of an exception": (lambda text: crash_lost_peer([text]), lambda n: "dist" * (n // 4)),
    "assertions that do not fail": (is_telling, lambda n: "assertion " * (n // 10)),
    "lists in a template": (parsed, lambda n: template({"volumes": [[]] * n})),
    "arguments": (parsed, lambda n: {"args": ["x" * n]}),
    "a status of ranks": (read_status, lambda n: json.dumps({"version": 1, "ranks": [{"rank": 1}] * n})),
    "a termination of digits": (read_termination, lambda n: '{"version": 1, "rank": 1' + "0" * (n // 100) + "}"),
    # of the next two so many that the caches hold them: from memory, each takes three times as long
    "a status of metrics": (
        read_status,
        lambda n: json.dumps({"version": 1, "metrics": {f"m{number}": number for number in range(n // 4)}}),
    ),
    "conditions of a pod": (
        parse_pod,
        lambda n: {
            "metadata": {"name": "a", "labels": {LABEL_ATTEMPT: "0", LABEL_NODE_RANK: "0"}},
            "status": {"conditions": [{"type": f"c{number}"} for number in range(n // 4)]},
        },
    ),
}


def seconds(run: Callable[[Any], Any], value: Any) -> float:
    begun = time.process_time()
    run(value)
    return time.process_time() - begun


def best_seconds(run: Callable[[Any], Any], value: Any, enough: float = 0.0) -> float:
    """The best of three runs, fewer once one took no longer than `enough`: another process takes caches and memory."""
    best = float("inf")
    for _ in range(3):
        best = min(best, seconds(run, value))
        if best < enough:
            break
    return best


@pytest.mark.parametrize("name", CASES)
def test_time_grows_with_the_length_of_the_text_and_no_faster(name: str) -> None:
    run, make = CASES[name]
    most = MOST * max(best_seconds(run, make(20_000)), SHORTEST_SECONDS)
    assert best_seconds(run, make(20_000 * TIMES), enough=most) < most


def test_the_measure_tells_a_parser_that_is_quadratic() -> None:
    def quadratic(items: list[int]) -> None:
        for _ in items:
            sum(items)

    assert best_seconds(quadratic, [1] * 400 * TIMES) > MOST * best_seconds(quadratic, [1] * 400)
