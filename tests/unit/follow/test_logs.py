"""Lines of the pods' logs as `ddpjob logs` shows them: of which rank they are, and which are wanted."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from ddpjob_operator.cli.on_cluster import seconds
from ddpjob_operator.core.values.observed import NO_ATTEMPT, PodPhase, PodView
from ddpjob_operator.follow.logs import JobLogs, Wanted, is_wanted, nodes_without_log, parse_line, pods_of

STAMP = "2030-01-01T12:00:00.123456789Z"


def pod(attempt: int, node_rank: int | None) -> PodView:
    name = f"digits-{attempt}-{node_rank}"
    return PodView(name, name, attempt, node_rank, PodPhase.RUNNING)


@pytest.mark.parametrize(
    ("raw", "rank", "text"),
    [
        ("hello", 4, "hello"),
        ("[local rank 3] hello", 7, "hello"),
        ("say [local rank 3] hello", 4, "say [local rank 3] hello"),
        ("10%\r 50%\r100%\r", 4, "100%"),
        ("[local rank 1] 10%\rloss 0.3", 4, "loss 0.3"),
        ("10%\r[local rank 1] loss 0.3", 5, "loss 0.3"),
        ("\x1b]0;title\x07red", 4, "]0;titlered"),
        ("", 4, ""),
    ],
)
def test_a_line_has_its_global_rank_and_no_control_characters(raw: str, rank: int, text: str) -> None:
    line = parse_line(f"{STAMP} {raw}", node=1, ranks_per_node=4)
    assert (line.stamp, line.node, line.rank, line.text) == (STAMP, 1, rank, text)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(), ["digits-2-0", "digits-2-1"]),
        (Wanted(node=1), ["digits-2-1"]),
        (Wanted(rank=5), ["digits-2-1"]),
        (Wanted(rank=3), ["digits-2-0"]),
        (Wanted(attempt=1), ["digits-1-0"]),
        (Wanted(attempt=7), []),
    ],
)
def test_the_newest_attempt_is_read_unless_another_is_named(wanted: Wanted, names: list[str]) -> None:
    pods = [pod(2, 1), pod(1, 0), pod(2, 0), pod(2, None), pod(NO_ATTEMPT, 0)]
    assert [found.name for found in pods_of(pods, wanted, ranks_per_node=4)] == names


def test_of_a_node_with_several_ranks_only_the_lines_of_the_wanted_one_are_shown() -> None:
    lines = [parse_line(f"{STAMP} {raw}", 1, 4) for raw in ("a", "[local rank 1] b", "[local rank 2] c")]
    assert [line.text for line in lines if is_wanted(line, Wanted(rank=5))] == ["b"]
    assert [line.text for line in lines if is_wanted(line, Wanted(pattern=re.compile("[ac]")))] == ["a", "c"]


def test_what_the_kubelet_can_leave_out_is_left_to_it() -> None:
    assert Wanted(node=1).query() == {}
    assert Wanted(tail=5, since_seconds=60).query() == {"tailLines": "5", "sinceSeconds": "60"}


class Pods:
    """Answers as the API server does: one pod whose ranks 0 and 1 print in turn, and whose log ends."""

    LOG: tuple[str, ...] = tuple(
        f"2030-01-01T12:00:0{number}Z {'[local rank 1] ' * (number % 2)}line {number}" for number in range(8)
    )

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        log = [line for line in self.LOG if line >= query.get("sinceTime", "")]
        for line in log[max(0, len(log) - int(query.get("tailLines", len(log)))) :]:
            yield line


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (Wanted(rank=1, tail=2), ["line 5", "line 7"]),
        (Wanted(rank=1, tail=9), ["line 1", "line 3", "line 5", "line 7"]),
        (Wanted(rank=1, tail=0), []),
        (Wanted(pattern=re.compile("[02]"), tail=1), ["line 2"]),
        (Wanted(node=0, tail=3), ["line 5", "line 6", "line 7"]),
    ],
)
async def test_the_last_lines_are_counted_among_those_that_are_wanted(wanted: Wanted, texts: list[str]) -> None:
    logs = JobLogs(cast(Any, Pods()), "default", "digits", ranks_per_node=2, wanted=wanted)
    assert [line.text for line in await logs._whole(pod(0, 0)) or ()] == texts
    followed: list[str] = []
    await logs._stream(pod(0, 0), lambda line: followed.append(line.text), pytest.fail)
    assert followed == texts


async def test_what_the_kubelet_says_of_a_container_that_is_gone_is_no_line_of_a_rank() -> None:
    pods = Pods()
    pods.LOG = (f"{STAMP} step 1", "error: code = NotFound desc = an error occurred when try to find container")
    logs = JobLogs(cast(Any, pods), "default", "digits", ranks_per_node=2, wanted=Wanted())
    assert [line.text for line in await logs._whole(pod(0, 0)) or ()] == ["step 1"]
    pods.LOG = pods.LOG[1:]
    assert await logs._whole(pod(0, 0)) is None


@pytest.mark.parametrize(
    ("there", "with_log", "ranks"),
    [
        ([0, 1, 2], [0, 1, 2], None),
        ([0, 2], [0, 2], "node rank 1"),
        ([0, 1, 2], [2], "node ranks 0, 1"),
    ],
)
def test_nodes_whose_log_is_gone_are_named(there: list[int], with_log: list[int], ranks: str | None) -> None:
    said = nodes_without_log([pod(0, rank) for rank in there], [pod(0, rank) for rank in with_log], 3, "digits")
    assert said == (
        ranks and f"no log of {ranks} any more; ddpjob logs digits --on-volume reads it from the job's volume"
    )


def test_a_pod_that_has_not_started_is_not_missed() -> None:
    waiting = replace(pod(0, 1), phase=PodPhase.PENDING)
    assert nodes_without_log([pod(0, 0), waiting], [pod(0, 0)], 2, "digits") is None


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2h", 7200)])
def test_a_duration_is_written_as_in_kubectl(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "10", "1d", "-5m", "m", "5 m"])
def test_what_is_no_duration_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match="write one such as 90s, 10m or 1h30m"):
        seconds(text)
