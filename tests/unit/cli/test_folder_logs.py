"""`ddpjob logs --shared`: the lines that a run of this machine, or a pod that is gone, has left in a folder."""

from __future__ import annotations

import json
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app
from ddpjob_operator.page.shared import Shared

followed_or_not = pytest.mark.parametrize("follow", [(), ("--follow",)], ids=["now", "followed"])


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Of a job of 2 nodes with 2 ranks each, which has failed once and succeeded then."""
    pods = tmp_path / "logs" / "digits" / "pods"
    pods.mkdir(parents=True)
    status = {"phase": "Succeeded", "attempt": 1}
    about = {"version": 1, "job": "digits", "uid": "u", "nodes": 2, "procsPerNode": 2, "status": status}
    (pods.parent / "status.json").write_text(json.dumps(about))
    for attempt in (0, 1):
        for node in (0, 1):
            name = f"digits-{attempt}-{node}"
            lines = [f"---- 2026-01-02T03:04:05Z {name} (p) starts"]
            lines += [f"[local rank {rank}] attempt {attempt}, line {n}" for n in (1, 2) for rank in (0, 1)]
            (pods / f"{name}.log").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def write_log(shared: Path, pod: str, lines: list[str], end: str = "\n") -> int:
    """Bytes of the log that the pod has now."""
    header = f"---- 2026-01-02T03:04:05Z {pod} (p) starts\n"
    return (shared / "logs" / "digits" / "pods" / f"{pod}.log").write_bytes((header + "\n".join(lines) + end).encode())


def printed(shared: Path, *options: str, name: str = "digits", code: int = 0) -> list[str]:
    done = CliRunner().invoke(app, ["logs", name, "--shared", str(shared), *options])
    assert done.exit_code == code, done.output
    return done.output.splitlines()


def test_lines_of_the_newest_attempt_are_printed_with_their_ranks(shared: Path) -> None:
    assert printed(shared) == [
        f"[rank {2 * node + rank}] attempt 1, line {line}" for node in (0, 1) for line in (1, 2) for rank in (0, 1)
    ]


@followed_or_not
@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--rank", "3"], ["[rank 3] attempt 1, line 1", "[rank 3] attempt 1, line 2"]),
        (["--node", "1", "--grep", "line 2"], ["[rank 2] attempt 1, line 2", "[rank 3] attempt 1, line 2"]),
        (["--attempt", "0", "--tail", "1"], ["[rank 1] attempt 0, line 2", "[rank 3] attempt 0, line 2"]),
    ],
)
def test_lines_are_chosen(shared: Path, options: list[str], lines: list[str], follow: tuple[str, ...]) -> None:
    assert printed(shared, *options, *follow) == lines


def test_the_last_lines_are_those_of_the_ones_that_match(shared: Path) -> None:
    assert printed(shared, "--tail", "1", "--grep", "line 1") == [
        "[rank 1] attempt 1, line 1",
        "[rank 3] attempt 1, line 1",
    ]


@followed_or_not
def test_of_a_large_log_every_line_is_printed(shared: Path, follow: tuple[str, ...]) -> None:
    lines = [f"step {step} of 9000, {'x' * 200}" for step in range(9000)]
    assert write_log(shared, "digits-1-0", lines) > 1 << 20
    write_log(shared, "digits-1-1", ["of node 1"])
    assert printed(shared, *follow) == [*(f"[rank 0] {line}" for line in lines), "[rank 2] of node 1"]


@followed_or_not
def test_a_progress_bar_and_a_last_line_without_an_end_are_printed(shared: Path, follow: tuple[str, ...]) -> None:
    write_log(shared, "digits-1-0", ["[local rank 1] 10%\r[local rank 1] 90%\rloss 1.0\r", "killed he"], end="")
    assert printed(shared, "--node", "0", *follow) == [
        "[rank 1] 10%",
        "[rank 1] 90%",
        "[rank 0] loss 1.0",
        "[rank 0] killed he",
    ]


@followed_or_not
@pytest.mark.parametrize(("tail", "count"), [("0", 0), ("99999999999999999999", 8)])
def test_the_last_lines_are_none_or_all(shared: Path, tail: str, count: int, follow: tuple[str, ...]) -> None:
    assert sum(line.startswith("[rank") for line in printed(shared, "--tail", tail, *follow)) == count


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--node", "1", "--tail", "2"], ["[rank 2] the last but one", "[rank 2] the last"]),
        (["--grep", "the last$"], ["[rank 0] the last", "[rank 2] the last"]),
        (["--grep", "the last$", "--follow"], ["[rank 0] the last", "[rank 2] the last"]),
    ],
)
def test_large_logs_are_not_held_in_memory(shared: Path, options: list[str], lines: list[str]) -> None:
    # long lines: what counts are the bytes, and to trace the memory of each line takes time
    log = [*(f"{number} {'x' * 4000}" for number in range(6_000)), "the last but one", "the last"]
    assert all(write_log(shared, f"digits-1-{node}", log) > 24_000_000 for node in (0, 1))
    del log
    printed(shared, "--attempt", "0", *options)  # what is imported late is no part of the measure
    tracemalloc.start()
    try:
        found = printed(shared, *options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == lines
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (["--node", "1", "--tail", "10"], {"digits-1-1"}),
        (["--rank", "3"], {"digits-1-1"}),
        (["--rank", "1", "--attempt", "0", "--follow"], {"digits-0-0"}),
        (["--node", "0", "--follow"], {"digits-1-0"}),
        ([], {"digits-1-0", "digits-1-1"}),
    ],
)
def test_logs_without_a_wanted_line_are_not_opened(
    shared: Path, options: list[str], read: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[Path] = set()
    open_path = Shared.open

    def noted(folder: Shared, path: Path) -> Any:
        opened.add(path)
        return open_path(folder, path)

    monkeypatch.setattr(Shared, "open", noted)
    assert printed(shared, *options)
    assert {path.stem for path in opened if path.suffix == ".log"} == read


def test_the_ranks_of_a_node_are_not_guessed_where_the_folder_does_not_say_how_many_it_has(shared: Path) -> None:
    (shared / "logs" / "digits" / "status.json").unlink()
    assert printed(shared, "--attempt", "1", "--rank", "1", "--tail", "1") == ["[rank 1] attempt 1, line 2"] * 2


@pytest.fixture
def of_a_cluster(tmp_path: Path) -> Path:
    """What the launcher of a pod with 2 ranks has left on the volume: lines with times, and no status."""
    pods = tmp_path / "logs" / "digits" / "pods"
    pods.mkdir(parents=True)
    earlier = ["---- 2026-01-01T03:04:05Z digits-0-1 (o) starts, 4 ranks, with times", "of an earlier run"]
    now = datetime.now(UTC)
    times = [f"{now - timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%S.%f}Z" for minutes in (20, 5)]
    lines = [f"---- {now:%Y-%m-%dT%H:%M:%SZ} digits-0-1 (u) starts, 2 ranks, with times"]
    lines += [f"{time} [local rank 1] line {number}" for number, time in enumerate(times)]
    (pods / "digits-0-1.log").write_text("".join(f"{line}\n" for line in (*earlier, *lines)))
    return tmp_path


@followed_or_not
@pytest.mark.parametrize(
    ("options", "lines"),
    [([], ["line 0", "line 1"]), (["--since", "10m"], ["line 1"]), (["--since", "99999999999h"], ["line 0", "line 1"])],
)
def test_lines_of_a_cluster_have_the_ranks_and_times_that_the_log_says(
    of_a_cluster: Path, options: list[str], lines: list[str], follow: tuple[str, ...]
) -> None:
    code = 1 if follow else 0  # nothing in the folder says how it has ended
    assert printed(of_a_cluster, *options, *follow, code=code) == [f"[rank 3] {line}" for line in lines]


def test_the_last_lines_that_are_new_enough_are_counted(of_a_cluster: Path) -> None:
    assert printed(of_a_cluster, "--since", "10m", "--tail", "2") == ["[rank 3] line 1"]


def test_a_job_that_has_failed_is_followed_to_exit_code_1(shared: Path) -> None:
    file = shared / "logs" / "digits" / "status.json"
    file.write_text(file.read_text().replace("Succeeded", "Failed"))
    assert len(printed(shared, "--follow", code=1)) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "5m"], "digits-1-0.log have no times, as ddpjob run wrote it; give --tail"),
        (["--since", "5m", "--follow"], "digits-1-0.log have no times, as ddpjob run wrote it; give --tail"),
        (["--on-volume"], "--on-volume, --claim, --image: with --shared the folder is read here; leave them out"),
        (["--namespace", "ns"], "--shared: a folder has no namespaces and contexts; leave those options out"),
        (["--follow", "--tail", "1", "--grep", "x"], "--tail: with --shared and --follow it counts all lines"),
    ],
)
def test_what_a_folder_does_not_have_is_refused(shared: Path, options: list[str], said: str) -> None:
    assert said in printed(shared, *options, code=2)[0]


def test_a_job_that_is_not_there_and_a_line_that_is_not_there_are_said(shared: Path) -> None:
    assert printed(shared, name="letters", code=2) == [
        f"error: --shared {shared}: no job letters there; jobs: digits",
    ]
    assert printed(shared, "--grep", "nowhere") == [f"ddpjob: {shared}/logs/digits/pods has no line that matches"]
