"""What of the ranks' output `ddpjob run` shows, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpjob_operator.local.output import MOST_BYTES, Logs, OutputFollower


@dataclass
class Pod:
    log: Path
    node_rank: int | None = 0
    uid: str = "uid-0"
    log_start: int = 0

    def write(self, data: bytes) -> None:
        with self.log.open("ab") as log:
            log.write(data)


@pytest.fixture
def pods(tmp_path: Path) -> list[Pod]:
    made = [Pod(tmp_path / f"pod-{node}.log", node, f"uid-{node}") for node in (0, 1)]
    for pod in made:
        pod.write(b"of an earlier run\n")
        pod.log_start = pod.log.stat().st_size
    return made


def shown(logs: Logs, pods: list[Pod], *writes: tuple[int, bytes]) -> list[str]:
    said: list[str] = []
    follower = OutputFollower(logs, said.append)
    follower.look(pods)
    for node, data in writes:
        pods[node].write(data)
        follower.look(pods)
    follower.close()
    return said


BOTH = ((0, b"first\nsec"), (1, b"of node 1\n"), (0, b"ond\n"))


@pytest.mark.parametrize(
    ("logs", "lines"),
    [
        (Logs.RANK, ["first", "second"]),
        (Logs.ALL, ["[node 0] first", "[node 1] of node 1", "[node 0] second"]),
        (Logs.NONE, []),
    ],
)
def test_whole_lines_are_shown_as_they_come_and_none_of_an_earlier_run(
    pods: list[Pod], logs: Logs, lines: list[str]
) -> None:
    assert shown(logs, pods, *BOTH) == lines


def test_a_last_line_without_an_end_is_shown(pods: list[Pod]) -> None:
    assert shown(Logs.RANK, pods, (0, b"Traceback")) == ["Traceback"]


def test_of_a_progress_bar_the_last_state_is_shown_and_no_control_character(pods: list[Pod]) -> None:
    assert shown(Logs.RANK, pods, (0, b"10%\r50%\r\x1b[31m100%\r\n")) == ["[31m100%"]


@pytest.mark.parametrize("state", [b"\r%d of 9999", b"%d of 9999\r"], ids=["return first", "return last"])
def test_a_progress_bar_without_an_end_takes_no_memory(pods: list[Pod], state: bytes) -> None:
    said: list[str] = []
    follower = OutputFollower(Logs.RANK, said.append)
    for number in range(0, 1000, 10):
        pods[0].write(b"".join(state % step for step in range(number, number + 10)))
        follower.look(pods)
        assert len(follower._followed["uid-0"].partial) < 20
    pods[0].write(b"\rdone\nnext\n")
    follower.look(pods)
    assert said == ["done", "next"]


def test_a_line_without_an_end_is_shown_in_parts(pods: list[Pod]) -> None:
    said = shown(Logs.RANK, pods, *[(0, b"." * 30_000)] * 5)
    assert [len(line) for line in said] == [90_000, 60_000]


def test_all_parts_of_a_line_of_another_rank_are_left_out(pods: list[Pod]) -> None:
    begun = b"[local rank 1] " + b"x" * (65 << 10)
    assert shown(Logs.RANK, pods, (0, begun), (0, b"y" * (65 << 10)), (0, b"z\nstep 1\n")) == ["step 1"]


def test_lines_that_another_rank_of_the_node_wrote_to_stderr_are_left_out(pods: list[Pod]) -> None:
    lines = (0, b"[local rank 1] other\n[local rank 0] own\n")
    assert shown(Logs.RANK, pods, lines) == ["[local rank 0] own"]


def test_a_line_that_ranks_share_with_progress_bars_is_that_of_the_last(pods: list[Pod]) -> None:
    lines = (0, b"[local rank 1] 10%\rloss 0.3\n20%\r[local rank 1] other\n")
    assert shown(Logs.RANK, pods, lines) == ["loss 0.3"]


def test_what_a_pod_wrote_before_it_was_replaced_is_shown(pods: list[Pod]) -> None:
    said: list[str] = []
    follower = OutputFollower(Logs.RANK, said.append)
    follower.look(pods)
    pods[0].write(b"last words\n")
    follower.look(pods[1:])
    assert said == ["last words"]


def test_a_flood_is_cut_and_says_where_all_of_it_is(pods: list[Pod]) -> None:
    said = shown(Logs.RANK, pods, (0, b"x" * 99 + b"\n" + b"y" * (MOST_BYTES - 1) + b"\n"))
    assert said == [f"… 100 bytes are only in {pods[0].log}", "y" * (MOST_BYTES - 1)]
