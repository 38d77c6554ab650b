"""`python -m ddp_trainer.logs.pods`: the lines of all pods of an attempt, by time, and those that are wanted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_trainer.contract.pod_logs import header, log_file, stamp
from ddp_trainer.logs.pods import main

NOW = time.time()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Two attempts of two pods with two ranks each; a line of each rank every ten seconds, up to now."""
    for attempt in (0, 10):
        for node in (0, 1):
            path = log_file(tmp_path / "logs" / "digits", f"digits-{attempt}-{node}", attempt, node)
            assert path is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [header(NOW, path.stem, "u", 2)]
            for second in (-20, -10, 0):
                for rank in (0, 1):
                    when = stamp(NOW + second + rank + node / 10)
                    prefix = f"[local rank {rank}] " if rank else ""
                    lines.append(f"{when} {prefix}attempt {attempt}, second {second}\n".encode())
            path.write_bytes(b"".join(lines))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], shared: Path, *options: str, code: int = 0) -> list[str]:
    assert main([str(shared), "digits", *options]) == code
    found = capsys.readouterr()
    return (found.out or found.err).splitlines()


def test_lines_of_the_newest_attempt_are_printed_by_time(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, shared) == [
        f"[rank {rank}] attempt 10, second {second}" for second in (-20, -10, 0) for rank in (0, 2, 1, 3)
    ]


def test_a_rank_of_thousands_of_digits_is_text(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log_file(shared / "logs" / "digits", "digits-10-0", 10, 0)
    assert path is not None
    printed_so = f"[local rank {'9' * 5000}] hello"
    path.write_bytes(header(NOW, path.stem, "u", 2) + f"{stamp(NOW)} {printed_so}\n".encode())
    assert printed(capsys, shared, "--node", "0") == [f"[rank 0] {printed_so}"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--rank", "3", "--attempt", "0"], [f"[rank 3] attempt 0, second {n}" for n in (-20, -10, 0)]),
        (["--node=1", "--grep=-20$"], ["[rank 2] attempt 10, second -20", "[rank 3] attempt 10, second -20"]),
        (["--tail", "1"], ["[rank 1] attempt 10, second 0", "[rank 3] attempt 10, second 0"]),
        (["--rank", "0", "--tail", "1"], ["[rank 0] attempt 10, second 0"]),
        (["--grep", "nowhere"], []),
    ],
)
def test_lines_are_chosen(
    shared: Path, options: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, shared, *options) == lines


def test_older_lines_are_left_out(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    since = str(time.time() - NOW + 15)
    assert {line.partition(", ")[2] for line in printed(capsys, shared, "--since", since)} == {"second -10", "second 0"}


def test_an_earlier_run_of_the_name_with_more_attempts_is_not_the_newest(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in shared.glob("logs/digits/pods/digits-10-*.log"):
        os.utime(path, (NOW - 86400, NOW - 86400))
    assert printed(capsys, shared, "--rank", "0", "--tail", "1") == ["[rank 0] attempt 0, second 0"]


def earlier(shared: Path, node: int, start: bytes) -> None:
    """A file of attempt 10 that an earlier job of the name, with more nodes, has left."""
    path = log_file(shared / "logs" / "digits", f"digits-10-{node}", 10, node)
    assert path is not None
    path.write_bytes(start + f"{stamp(NOW - 86400)} earlier\n".encode())
    os.utime(path, (NOW - 86400, NOW - 86400))


def test_nodes_of_an_earlier_job_of_the_name_are_left_out(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier(shared, 2, header(NOW - 86400, "digits-10-2", "before", 2))
    assert len(printed(capsys, shared)) == 12
    said = printed(capsys, shared, "--node", "2", code=2)
    assert "no log of node rank 2 of digits, attempt 10; it has 0, 1" in said[0]


def test_a_file_that_does_not_say_its_job_is_printed(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier(shared, 2, b"")
    assert "[rank 2] earlier" in printed(capsys, shared)
    assert printed(capsys, shared, "--node", "2") == ["[rank 2] earlier"]


@pytest.mark.parametrize("part", ["", " of before with 2 ranks"], ids=["of an older version", "of this one"])
def test_nodes_of_an_earlier_run_on_one_machine_are_left_out(
    shared: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier(shared, 2, f"---- 2030-01-01T12:00:00Z digits-10-2{part} (of-the-pod) starts\n".encode())
    assert len(printed(capsys, shared)) == 12
    assert "it has 0, 1" in printed(capsys, shared, "--node", "2", code=2)[0]


def test_pods_of_a_run_on_one_machine_have_each_a_uid_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in (0, 1):
        path = log_file(tmp_path / "logs" / "digits", f"digits-0-{node}", 0, node)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"---- 2030-01-01T12:00:00Z {path.stem} (uid-{node}) starts\nhello\n")
    assert printed(capsys, tmp_path) == ["[rank 0] hello", "[rank 1] hello"]


def of_run(shared: Path, attempt: int, node: int, uid: str) -> None:
    """What a pod of two ranks of `ddpjob run` has printed."""
    path = log_file(shared / "logs" / "digits", f"digits-{attempt}-{node}", attempt, node)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    start = f"---- 2030-01-01T12:00:00Z {path.stem} of {uid} with 2 ranks (of-pod-{node}) starts"
    path.write_text(f"{start}\nhello\n[local rank 1] hello\n")


def test_the_second_node_of_a_run_on_one_machine_has_the_ranks_after_those_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in (0, 1):
        of_run(tmp_path, 0, node, "run")
    assert printed(capsys, tmp_path) == [f"[rank {rank}] hello" for rank in range(4)]
    assert printed(capsys, tmp_path, "--rank", "3") == ["[rank 3] hello"]


def test_nodes_of_an_earlier_job_are_left_out_of_a_run_on_one_machine(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier(shared, 1, header(NOW - 86400, "digits-10-1", "before", 2))
    of_run(shared, 10, 0, "run")
    assert printed(capsys, shared) == ["[rank 0] hello", "[rank 1] hello"]


def test_on_a_claim_of_several_jobs_the_folder_of_the_job_is_found(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared / "jobs" / "digits").mkdir(parents=True)
    (shared / "logs").rename(shared / "jobs" / "digits" / "logs")
    assert len(printed(capsys, shared)) == 12


@pytest.mark.parametrize("is_own_newer", [True, False])
def test_of_a_folder_of_the_job_and_the_claim_the_newer_logs_are_printed(
    shared: Path, is_own_newer: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shared / "jobs" / "digits"
    path = log_file(own / "logs" / "digits", "digits-10-0", 10, 0)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(header(NOW, path.stem, "of-the-folder", 2) + f"{stamp(NOW)} of the folder\n".encode())
    when = time.time() + (86400 if is_own_newer else -86400)
    os.utime(path, (when, when))
    assert main([str(shared), "digits", "--rank", "0", "--tail", "1"]) == 0
    found = capsys.readouterr()
    assert found.out == f"[rank 0] {'of the folder' if is_own_newer else 'attempt 10, second 0'}\n"
    used, older = (own, shared) if is_own_newer else (shared, own)
    assert found.err == f"note: these are the logs in {used}; {older} has older ones, of an earlier job of the name\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attempt", "3"], "no logs of attempt 3 of digits; it has those of 0, 10"),
        (["--node", "7"], "no log of node rank 7 of digits, attempt 10; it has 0, 1"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    shared: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in printed(capsys, shared, *options, code=2)[0]
    assert main([str(shared), "letters"]) == 2
    assert "no logs of pods of letters; it has those of digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pod", "name"),
    [
        ("digits-0-1", "digits-3-7.log"),
        ("digits-2-s0", "digits-3-7.log"),
        ("digits-1-2-0-1", "digits-1-2-3-7.log"),
        ("digits-debug-12345678", None),
    ],
)
def test_a_place_has_a_file_whatever_place_its_pod_was_made_for(pod: str, name: str | None, tmp_path: Path) -> None:
    found = log_file(tmp_path, pod, 3, 7)
    assert (found and found.name) == name
