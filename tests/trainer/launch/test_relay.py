"""What a rank prints gets a prefix where a line begins, and nowhere else."""

from __future__ import annotations

import fcntl
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


def test_a_rank_that_writes_without_a_pause_does_not_keep_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher's one thread has SIGTERM to pass on."""
    relay = Relay(tmp_path / "pipe", "stdout")
    reads = 0

    def full(_: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        assert reads < 100, "it reads on as long as the rank writes"
        return b"a\n" * (size // 2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", full)
        assert relay.relay(), "there may be more"
    assert not relay.relay()
    relay.close()
    assert capfd.readouterr().out.startswith("a\na\n")


def test_all_that_is_there_is_passed_on_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relay = Relay(tmp_path / "pipe", "stdout")
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 19)
    os.write(writer, b"a\n" * (size // 2))
    relay.drain()
    os.close(writer)
    relay.close()
    assert capfd.readouterr().out == "a\n" * (size // 2)


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
