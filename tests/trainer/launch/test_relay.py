"""What a rank prints gets a prefix where a line begins, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_trainer.contract.run_dir import stderr_pipe
from ddp_trainer.launch.relay import Relay, StderrRelay

PREFIX = "[local rank 1] "


def test_a_line_that_is_passed_on_in_parts_has_one_prefix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relay = Relay(tmp_path / "pipe", "stdout", PREFIX)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    for part in (b"first\n", b"a" * 40_000, b"b" * 40_000, b"c", b"\n", b"last"):
        os.write(writer, part)
        relay.relay()
    relay.drain()
    os.close(writer)
    relay.close()
    long = "a" * 40_000 + "b" * 40_000 + "c"
    assert capfd.readouterr().out.splitlines() == [f"{PREFIX}first", f"{PREFIX}{long}", f"{PREFIX}last"]


def test_what_python_says_of_the_shared_memory_of_a_crashed_rank_is_passed_on_and_not_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    relay = StderrRelay(tmp_path, 0)
    writer = os.open(stderr_pipe(tmp_path, 0), os.O_WRONLY)
    tracker = (
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to "
        "be 7 leaked shared_memory objects to clean up at shutdown\n"
        "  warnings.warn('resource_tracker: There appear to be %d '\n"
    )
    os.write(writer, f"driver lost\n{tracker}".encode())
    relay.drain()
    os.close(writer)
    assert relay.last_lines == ["driver lost"]
    relay.close()
    assert tracker in capfd.readouterr().err
