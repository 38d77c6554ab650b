"""`ddpjob logs --shared`: the lines that a run of this machine, or a pod that is gone, has left in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app


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


def printed(shared: Path, *options: str, name: str = "digits", code: int = 0) -> list[str]:
    done = CliRunner().invoke(app, ["logs", name, "--shared", str(shared), *options])
    assert done.exit_code == code, done.output
    return done.output.splitlines()


def test_lines_of_the_newest_attempt_are_printed_with_their_ranks(shared: Path) -> None:
    assert printed(shared) == [
        f"[rank {2 * node + rank}] attempt 1, line {line}" for node in (0, 1) for line in (1, 2) for rank in (0, 1)
    ]


@pytest.mark.parametrize("follow", [(), ("--follow",)], ids=["now", "followed"])
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


def test_a_job_that_has_failed_is_followed_to_exit_code_1(shared: Path) -> None:
    file = shared / "logs" / "digits" / "status.json"
    file.write_text(file.read_text().replace("Succeeded", "Failed"))
    assert len(printed(shared, "--follow", code=1)) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "5m"], "--since: the lines in a folder have no times; give --tail"),
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
