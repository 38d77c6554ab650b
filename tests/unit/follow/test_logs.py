"""Lines of the pods' logs as `ddpjob logs` shows them: of which rank they are, and which are wanted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from tests.unit.virtual_time import run
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.parameters import seconds
from ddpjob_operator.core.values.observed import NO_ATTEMPT, PodPhase, PodView
from ddpjob_operator.follow.lines import Line, Wanted, is_wanted, nodes_without_log, parse_line, pods_of
from ddpjob_operator.follow.logs import LOGS_AT_ONCE, JobLogs
from ddpjob_operator.runtime.errors import ApiError

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
        pytest.param(f"[local rank {'9' * 5000}] hello", 4, f"[local rank {'9' * 5000}] hello", id="no number"),
    ],
)
def test_a_line_has_its_global_rank_and_no_control_characters(raw: str, rank: int, text: str) -> None:
    line = parse_line(f"{STAMP} {raw}", node=1, ranks_per_node=4)
    assert (line.stamp, line.node, line.rank, line.text) == (STAMP, 1, rank, text)


@pytest.mark.parametrize(
    ("stamp", "utc"),
    [
        (STAMP, STAMP),
        ("2026-10-25T02:59:59.123456789+02:00", "2026-10-25T00:59:59.123456789Z"),
        ("2026-10-25T02:00:00.000000001+01:00", "2026-10-25T01:00:00.000000001Z"),
        ("2026-01-01T04:29:59+05:30", "2025-12-31T22:59:59Z"),
        ("2025-12-31T22:00:00.5-08:00", "2026-01-01T06:00:00.5Z"),
        ("2026-01-01T00:00:00.000000000+00:00", "2026-01-01T00:00:00.000000000Z"),
    ],
)
def test_the_local_time_of_a_node_is_compared_as_utc(stamp: str, utc: str) -> None:
    """Ranks on nodes in other time zones were out of order, and an hour was lost where clocks were set back."""
    assert parse_line(f"{stamp} step 1", node=0, ranks_per_node=1).stamp == utc


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


class Breaks(Pods):
    """The connection breaks once, after so many lines."""

    LOG = (
        "2030-01-01T12:00:00Z a",
        "2030-01-01T12:00:01Z b",
        "2030-01-01T12:00:01Z c",
        "2030-01-01T12:00:01Z d",
        "2030-01-01T12:00:02Z e",
    )

    def __init__(self, after: int) -> None:
        self.after: int | None = after

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        number = 0
        async for line in super().lines(path, **query):
            if number == self.after:
                self.after = None
                raise ApiError(0, "ConnectionFailed", "it broke")
            number += 1
            yield line


@pytest.mark.parametrize("after", range(6))
def test_lines_with_one_time_stamp_are_all_shown_once(after: int) -> None:
    """CRI-O gives the same stamp to all lines that it has read at once, such as those of a traceback."""
    logs = JobLogs(cast(Any, Breaks(after)), "default", "digits", ranks_per_node=2, wanted=Wanted())
    lines, notes = list[str](), list[str]()

    async def followed() -> None:
        await logs._stream(pod(0, 0), lambda line: lines.append(line.text), notes.append)

    run(followed())
    assert lines == ["a", "b", "c", "d", "e"]
    assert notes == ([] if after == 5 else ["digits-0-0: it broke; connecting again"])


async def test_the_last_ones_of_lines_with_one_time_stamp_come_once() -> None:
    logs = JobLogs(
        cast(Any, Breaks(9)),
        "default",
        "digits",
        ranks_per_node=2,
        wanted=Wanted(pattern=re.compile("[b-d]"), tail=2),
    )
    lines = list[str]()
    await logs._stream(pod(0, 0), lambda line: lines.append(line.text), pytest.fail)
    assert lines == ["c", "d"]


def test_lines_that_a_number_of_last_lines_leaves_out_do_not_come_with_a_new_connection() -> None:
    """The lines of one stamp come again, also those before the last ones that were asked for."""
    pods = Breaks(1)
    pods.LOG = Breaks.LOG[1:4]
    logs = JobLogs(cast(Any, pods), "default", "digits", ranks_per_node=2, wanted=Wanted(tail=2))
    lines, notes = list[str](), list[str]()

    async def followed() -> None:
        await logs._stream(pod(0, 0), lambda line: lines.append(line.text), notes.append)

    run(followed())
    assert lines == ["c", "d"]
    assert len(notes) == 1


async def test_what_the_kubelet_says_of_a_container_that_is_gone_is_no_line_of_a_rank() -> None:
    pods = Pods()
    pods.LOG = (f"{STAMP} step 1", "error: code = NotFound desc = an error occurred when try to find container")
    logs = JobLogs(cast(Any, pods), "default", "digits", ranks_per_node=2, wanted=Wanted())
    assert [line.text for line in await logs._whole(pod(0, 0)) or ()] == ["step 1"]
    pods.LOG = pods.LOG[1:]
    assert await logs._whole(pod(0, 0)) is None


async def test_the_logs_of_many_pods_are_not_read_all_at_once() -> None:
    """Each is a connection, and of a job with 1,024 pods no process would have files for all."""

    class Many:
        now = most = 0

        async def get(self, path: str, resource: str) -> dict[str, Any]:
            status = {"phase": "Running", "nodes": {"ready": 300, "total": 300}}
            return {"metadata": {"name": "digits", "uid": "job"}, "spec": {"nodes": 300}, "status": status}

        async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
            return [json_pod(0, rank) for rank in range(300)], 1

        async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            yield f"{STAMP} {path}"
            self.now -= 1

    api = Many()
    logs = JobLogs(cast(Any, api), "default", "digits", ranks_per_node=1, wanted=Wanted())
    assert len({line.text async for line in logs.now(pytest.fail)}) == 300
    assert 1 < api.most <= LOGS_AT_ONCE


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


def test_of_many_nodes_whose_log_is_gone_few_are_named() -> None:
    said = nodes_without_log([pod(0, 0)], [pod(0, 0)], 1024, "digits")
    assert said is not None
    assert said.startswith("no log of 1023 nodes any more, such as node ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10; ")


def test_a_pod_that_has_not_started_is_not_missed() -> None:
    waiting = replace(pod(0, 1), phase=PodPhase.PENDING)
    assert nodes_without_log([pod(0, 0), waiting], [pod(0, 0)], 2, "digits") is None


Log = Callable[[], AsyncGenerator[str]]
LONG_AGO, NOT_SOON = "2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


def json_pod(attempt: int, node_rank: int, phase: str = "Running", gone_by: str | None = None) -> dict[str, Any]:
    name = f"digits-{attempt}-{node_rank}"
    labels = {"training.ddpjob.io/attempt": str(attempt), "training.ddpjob.io/node-rank": str(node_rank)}
    metadata = {"name": name, "uid": name, "labels": labels, "ownerReferences": [{"uid": "job", "controller": True}]}
    return {
        "metadata": metadata | ({"deletionTimestamp": gone_by} if gone_by else {}),
        "status": {"phase": phase},
    }


@dataclass
class Following:
    """Answers as the API server does: a job whose attempt, phase and pods change at virtual times, and logs."""

    job: Sequence[tuple[float, int, str]]
    pods: Sequence[tuple[float, Sequence[dict[str, Any]]]]
    logs: dict[str, Log]
    away: tuple[float, float] = (0, 0)
    """From when until when nothing but logs is answered."""

    async def get(self, path: str, resource: str) -> dict[str, Any]:
        self._check()
        _, attempt, phase = max(item for item in self.job if item[0] <= asyncio.get_running_loop().time())
        status = {"phase": phase, "attempt": attempt}
        return {"metadata": {"name": "digits", "uid": "job"}, "spec": {"nodes": 2}, "status": status}

    async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
        self._check()
        found = [pods for time, pods in self.pods if time <= asyncio.get_running_loop().time()]
        return list(found[-1]), 1

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        async for line in self.logs[path.split("/")[-2]]():
            if line >= query.get("sinceTime", ""):
                yield line

    def _check(self) -> None:
        if self.away[0] <= asyncio.get_running_loop().time() < self.away[1]:
            raise ApiError(0, "ConnectionFailed", "connection reset by peer")

    def follow(
        self, wanted: Wanted | None = None, most: float = 900, show: Callable[[Line], str] = lambda line: line.text
    ) -> tuple[bool, float, list[str], list[str]]:
        """Whether it succeeded, after how many seconds, the lines and the notes."""
        lines, notes = list[str](), list[str]()

        async def followed() -> tuple[bool, float]:
            logs = JobLogs(cast(Any, self), "default", "digits", ranks_per_node=1, wanted=wanted or Wanted())
            async with asyncio.timeout(most):
                succeeded = await logs.follow(lambda line: lines.append(show(line)), notes.append)
            return succeeded, asyncio.get_running_loop().time()

        return *run(followed()), lines, notes


def log(*lines: tuple[float, str]) -> Log:
    """Lines, each so many seconds after the one before; then the log ends."""

    async def printed() -> AsyncGenerator[str]:
        for number, (seconds_later, text) in enumerate(lines):
            await asyncio.sleep(seconds_later)
            yield f"2030-01-01T12:{number // 60:02}:{number % 60:02}Z {text}"

    return printed


async def of_a_dead_node() -> AsyncGenerator[str]:
    """The log of a pod whose node goes at 5 s."""
    if asyncio.get_running_loop().time() >= 5:
        raise ApiError(500, "InternalError", "dial tcp 10.0.0.2:10250: i/o timeout")
    yield f"{STAMP} alive"
    await asyncio.sleep(5)
    raise ApiError(0, "ConnectionFailed", "it broke")


def test_a_pod_that_a_lost_node_has_left_does_not_keep_the_command_from_ending() -> None:
    left = json_pod(0, 1, gone_by=LONG_AGO)
    pods = [
        (0, [json_pod(0, 0), json_pod(0, 1)]),
        (30, [left, json_pod(1, 0), json_pod(1, 1)]),
        (100, [left, json_pod(1, 0, "Succeeded"), json_pod(1, 1, "Succeeded")]),
    ]
    new = log((70, "step 2"))
    logs: dict[str, Log] = {"digits-0-0": log((9, "step 1")), "digits-0-1": of_a_dead_node}
    job = [(0, 0, "Running"), (30, 1, "Running"), (100, 1, "Succeeded")]
    api = Following(job, pods, logs | {"digits-1-0": new, "digits-1-1": new})
    succeeded, seconds_spent, lines, notes = api.follow()
    assert succeeded
    assert 100 < seconds_spent < 120
    assert lines == ["alive", "step 1", "step 2", "step 2"]
    assert notes == [
        "digits-0-1: it broke; connecting again",
        "attempt 1 begins",
        "digits-0-1: its log brings nothing and does not end; it is not followed any more",
    ]


def test_the_logs_of_a_job_that_is_over_are_read_to_their_ends_however_long_that_takes() -> None:
    printed = [(0.3, f"step {number}") for number in range(600)]
    slow = log(*printed, (9, "the last line"))
    api = Following([(0, 0, "Succeeded")], [(0, [json_pod(0, 0, "Succeeded")])], {"digits-0-0": slow})
    succeeded, seconds_spent, lines, notes = api.follow()
    assert (succeeded, len(lines), lines[-1], notes) == (True, 601, "the last line", [])
    assert seconds_spent == pytest.approx(189), "the end of the last log is the end"


def test_lines_that_no_filter_leaves_count_as_read() -> None:
    slow = log(*[(0.3, "step")] * 600, (0, "loss 1"))
    api = Following([(0, 0, "Failed")], [(0, [json_pod(0, 0, "Failed")])], {"digits-0-0": slow})
    assert api.follow(Wanted(pattern=re.compile("loss")))[2] == ["loss 1"]


def test_a_pod_that_saves_its_snapshot_after_the_end_of_its_job_is_followed_to_its_end() -> None:
    pods = [(0, [json_pod(0, 0)]), (10, [json_pod(0, 0, gone_by=NOT_SOON)])]
    api = Following([(0, 0, "Running"), (9, 0, "Failed")], pods, {"digits-0-0": log((1, "step 1"), (60, "saved"))})
    succeeded, _, lines, notes = api.follow()
    assert (succeeded, lines, notes) == (False, ["step 1", "saved"], [])


def test_a_pod_that_goes_on_in_the_next_attempt_does_not_hold_up_the_end_of_the_one_that_is_followed() -> None:
    moved = json_pod(0, 0)
    moved["metadata"]["labels"] = json_pod(1, 0)["metadata"]["labels"]
    job = [(0, 0, "Running"), (20, 1, "Running")]
    api = Following(job, [(0, [json_pod(0, 0)]), (20, [moved])], {"digits-0-0": log(*[(0.5, "step")] * 1800)})
    _, seconds_spent, _, notes = api.follow(Wanted(attempt=0))
    assert 20 < seconds_spent < 40
    assert notes == ["digits-0-0 goes on; its log is not followed any more"]


class OfOneClock(Following):
    """Its pods print at virtual times, and the kubelet knows how old a line is."""

    def __init__(self, printed: dict[str, Sequence[tuple[float, str]]], *args: Any) -> None:
        super().__init__(*args, {})
        self.printed = printed

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        clock = asyncio.get_running_loop().time
        oldest = clock() - float(query.get("sinceSeconds", "inf"))
        for time, text in self.printed[path.split("/")[-2]]:
            if time >= oldest:
                await asyncio.sleep(time - clock())
                yield f"2030-01-01T12:{time // 60:02.0f}:{time % 60:02.0f}Z {text}"


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        (Wanted(), ["[rank 0] a", "[rank 1] b", "[rank 1] c", "[rank 0] d", "[rank 1] e", "[rank 0] f"]),
        (Wanted(rank=0), ["[rank 0] a", "[rank 0] d", "[rank 0] f"]),
        (Wanted(node=1), ["[rank 1] b", "[rank 1] c", "[rank 1] e"]),
        (Wanted(rank=0, tail=5), ["[rank 0] a", "[rank 0] d", "[rank 0] f"]),
        (Wanted(rank=0, since_seconds=600), ["[rank 0] a", "[rank 0] d", "[rank 0] f"]),
    ],
)
@pytest.mark.parametrize("scope", ["InPlace", "Live"])
def test_a_pod_that_takes_another_place_has_the_ranks_of_that_place_from_then_on(
    wanted: Wanted, shown: list[str], scope: str
) -> None:
    """The second pod takes the place of the first one, which is gone, and a new pod that of the second."""
    attempt = 1 if scope == "InPlace" else 0
    moved, new = json_pod(0, 1), json_pod(attempt, 1) | {"status": {"phase": "Running"}}
    moved["metadata"]["labels"] = json_pod(attempt, 0)["metadata"]["labels"]
    new["metadata"] |= {"name": "new", "uid": "new"}
    ended = [item | {"status": {"phase": "Succeeded"}} for item in (moved, new)]
    printed: dict[str, Sequence[tuple[float, str]]] = {
        "digits-0-0": [(5, "a")],
        "digits-0-1": [(10, "b"), (20, "c"), (60, "d"), (80, "f")],
        "new": [(70, "e")],
    }
    pods = [(0, [json_pod(0, 0), json_pod(0, 1)]), (50, [moved, new]), (90, ended)]
    api = OfOneClock(printed, [(0, 0, "Running"), (50, attempt, "Running"), (90, attempt, "Succeeded")], pods)
    succeeded, _, lines, _ = api.follow(wanted, show=str)
    assert (succeeded, lines) == (True, shown)


def test_of_a_pod_that_is_gone_the_connection_is_closed() -> None:
    closed = list[float]()

    async def silent() -> AsyncGenerator[str]:
        try:
            yield f"{STAMP} alive"
            await asyncio.sleep(3600)
        finally:
            closed.append(asyncio.get_running_loop().time())

    pods = [(0, [json_pod(0, 0), json_pod(0, 1)]), (50, [json_pod(0, 0)])]
    logs: dict[str, Log] = {"digits-0-0": log((200, "step 1")), "digits-0-1": silent}
    api = Following([(0, 0, "Running"), (200, 0, "Succeeded")], pods, logs)
    assert api.follow()[2] == ["alive", "step 1"]
    assert 50 < closed[0] < 70


class Restarted(Following):
    """A kubelet is restarted after 3 s: the API server ends the log then, as it does at the end of a container."""

    def __init__(self, cut: str = "") -> None:
        pods = [(0, [json_pod(0, 0)]), (60, [json_pod(0, 0, "Succeeded")])]
        super().__init__([(0, 0, "Running"), (60, 0, "Succeeded")], pods, {})
        self.cut = cut
        self.asked: list[dict[str, str]] = []

    async def lines(self, path: str, **query: str) -> AsyncIterator[str]:
        clock = asyncio.get_running_loop().time
        self.asked.append(query)
        printed = (0, "2030-01-01T12:00:00Z a"), (2, "2030-01-01T12:00:02Z b"), (30, "2030-01-01T12:00:30.5Z a")
        for time, line in printed:
            if clock() < 3 <= time:
                await asyncio.sleep(3 - clock())
                if self.cut:
                    yield self.cut
                return
            if line >= query.get("sinceTime", ""):
                await asyncio.sleep(max(0, time - clock()))
                yield line
        await asyncio.sleep(60 - clock())


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [(Wanted(), ["a", "b", "a"]), (Wanted(tail=2), ["a", "b", "a"]), (Wanted(pattern=re.compile("a")), ["a", "a"])],
)
def test_a_log_that_ends_although_its_pod_goes_on_is_read_on_from_its_last_line(
    wanted: Wanted, shown: list[str]
) -> None:
    """What the pod printed from then on was never shown."""
    api = Restarted()
    succeeded, _, lines, notes = api.follow(wanted)
    assert (succeeded, lines, notes) == (True, shown, [])
    first, again = api.asked[:2]
    assert "sinceTime" not in first
    assert (again.get("sinceTime"), again.get("tailLines")) == ("2030-01-01T12:00:02Z", None)
    assert len(api.asked) == 2, "a log that ends with its pod is not read again"


@pytest.mark.parametrize("cut", ["2030-01-01T12:00:3", "2030-01-01T12:00:30.5Z"])
def test_a_line_whose_stamp_was_cut_is_not_what_a_log_is_read_on_from(cut: str) -> None:
    api = Restarted(cut)
    assert api.follow()[2] == ["a", "b", "a"]
    assert api.asked[1]["sinceTime"] == "2030-01-01T12:00:02Z"


def test_the_log_of_a_pod_whose_sidecar_starts_first_is_asked_for_until_it_is_there() -> None:
    """Such a pod is Running while the image of its trainer is pulled."""

    async def late() -> AsyncGenerator[str]:
        if asyncio.get_running_loop().time() < 20:
            raise ApiError(400, "BadRequest", 'container "trainer" in pod "digits-0-0" is waiting to start')
        yield f"{STAMP} step 1"
        await asyncio.sleep(60 - asyncio.get_running_loop().time())

    job, pods = [(0, 0, "Running"), (60, 0, "Succeeded")], [(0, [json_pod(0, 0)]), (60, [json_pod(0, 0, "Succeeded")])]
    succeeded, _, lines, notes = Following(job, pods, {"digits-0-0": late}).follow()
    assert (succeeded, lines, notes) == (True, ["step 1"], [])


def test_the_job_that_replaces_the_one_that_is_followed_is_not_shown_as_that_one() -> None:
    """`ddpjob submit --replace` creates the next job within a second of the deletion of the one before."""

    class Replaced(Following):
        async def get(self, path: str, resource: str) -> dict[str, Any]:
            uid = "job" if asyncio.get_running_loop().time() < 10 else "the next one"
            return await super().get(path, resource) | {"metadata": {"name": "digits", "uid": uid}}

    job, logs = [(0, 0, "Running"), (20, 0, "Succeeded")], {"digits-0-0": log((5, "step 1"), (10, "step 2"))}
    with pytest.raises(ApiError, match="digits in namespace default was deleted, and another job has its name now"):
        Replaced(job, [(0, [json_pod(0, 0)])], logs).follow()


def test_an_outage_of_the_api_server_does_not_end_the_following() -> None:
    pods = [(0, [json_pod(0, 0)])]
    job, logs = [(0, 0, "Running"), (200, 0, "Succeeded")], {"digits-0-0": log((150, "step 1"), (50, "step 2"))}
    succeeded, _, lines, notes = Following(job, pods, logs, away=(20, 140)).follow()
    assert (succeeded, lines, notes) == (True, ["step 1", "step 2"], ["connection reset by peer; trying again"])


def test_the_pods_of_a_large_job_are_listed_a_fifth_of_the_time_at_most() -> None:
    class Large(Following):
        listed = 0

        async def list(self, path: str, resource: str, **query: str) -> tuple[list[dict[str, Any]], int]:
            self.listed += 1
            await asyncio.sleep(2.0)
            return await super().list(path, resource, **query)

    job, logs = [(0, 0, "Running"), (100, 0, "Succeeded")], {"digits-0-0": log((50, "step 1"))}
    api = Large(job, [(0, [json_pod(0, 0)])], logs)
    succeeded, _, lines, notes = api.follow()
    assert (succeeded, lines, notes) == (True, ["step 1"], [])
    assert api.listed <= 15


def test_a_job_that_ends_right_after_an_outage_is_not_waited_for_as_a_large_one() -> None:
    job, logs = [(0, 0, "Running"), (141, 0, "Succeeded")], {"digits-0-0": log((130, "step 1"))}
    pods = [(0, [json_pod(0, 0)]), (130, [json_pod(0, 0, "Succeeded")])]
    succeeded, seconds_spent, *_ = Following(job, pods, logs, away=(20, 140)).follow()
    assert succeeded
    assert 141 <= seconds_spent < 145


def test_logs_that_may_not_be_read_are_asked_for_once_and_the_job_is_followed_to_its_end() -> None:
    refusal = 'pods "digits-0-0" is forbidden: User "ann" cannot get resource "pods/log" in API group ""'
    asked = list[float]()

    async def refused() -> AsyncGenerator[str]:
        asked.append(asyncio.get_running_loop().time())
        if asked:
            raise ApiError(403, "Forbidden", refusal)
        yield ""

    pods = [(0, [json_pod(0, 0), json_pod(0, 1), json_pod(0, 2)])]
    logs: dict[str, Log] = {"digits-0-0": refused, "digits-0-1": refused, "digits-0-2": log((9, "step 1"))}
    job = [(0, 0, "Running"), (100, 0, "Succeeded")]
    succeeded, seconds_spent, lines, notes = Following(job, pods, logs).follow()
    assert (succeeded, lines, asked) == (True, ["step 1"], [0, 0])
    assert 100 <= seconds_spent < 110
    what_to_do = "ask for the role view or edit, or name your own namespace with --namespace"
    assert notes == [f"{refusal}; {what_to_do}; logs that may not be read are not followed"]


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2h", 7200)])
def test_a_duration_is_written_as_in_kubectl(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "10", "1d", "-5m", "m", "5 m"])
def test_what_is_no_duration_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match="write one such as 90s, 10m or 1h30m"):
        seconds(text)


@pytest.mark.parametrize("since", ["0s", "0h0m"])
def test_no_time_at_all_is_refused_as_kubelets_do(since: str) -> None:
    """The API server wants a second at least, and `--follow` asked it again until the job had ended."""
    done = CliRunner().invoke(app, ["logs", "digits", "--follow", "--since", since])
    said = f"error: --since: {since} is no time; write such as 10m, or --tail 0 for new lines only\n"
    assert (done.exit_code, done.output) == (2, said)


def test_a_volume_is_not_followed() -> None:
    done = CliRunner().invoke(app, ["logs", "digits", "--follow", "--on-volume"])
    said = "error: --on-volume, --follow: the volume is read as it is; leave one of them out\n"
    assert (done.exit_code, done.output) == (2, said)
