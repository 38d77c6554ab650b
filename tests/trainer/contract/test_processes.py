"""Signals to the processes of a pod, which of them end by themselves, and how many files they may open."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from ddp_trainer.contract import processes


def test_a_process_that_may_not_be_signalled_keeps_no_signal_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ddpjob run`, a script may have started one with sudo."""
    signalled: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == 7:
            raise PermissionError(1, "Operation not permitted")
        if pid == 8:
            raise ProcessLookupError(3, "No such process")
        signalled.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    processes.send([6, 7, 8, 9], signal.SIGKILL)
    assert signalled == [6, 9]


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        pytest.param(1024, 524_288, 65_536, id="containerd 2"),
        pytest.param(256, 512, 512, id="a low bound"),
        pytest.param(1024, resource.RLIM_INFINITY, 65_536, id="no bound"),
        pytest.param(1 << 20, 1 << 20, None, id="high already"),
        pytest.param(resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, id="no limit already"),
    ],
)
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, is_refused: bool
) -> None:
    limits: list[tuple[int, int]] = []

    def set_limits(which: int, wanted: tuple[int, int]) -> None:
        limits.append(wanted)
        if is_refused:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    processes.allow_files()
    assert limits == ([] if raised is None else [(raised, hard)])


@pytest.mark.processes
@pytest.mark.parametrize(("handler", "removes"), [("SIG_IGN", True), ("SIG_DFL", False)])
def test_no_command_line_is_read_of_a_process_that_sigterm_ends(handler: str, removes: bool) -> None:
    """One that the kernel holds on to, as on a volume without an answer, would keep the launcher for as long."""
    script = (
        f"import signal, sys\nfor number in (2, 15): signal.signal(number, signal.{handler})\n"
        "print(flush=True)\nsys.stdin.read()  # resource_tracker import main"
    )
    command = [sys.executable, "-S", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.removes_shared_memory(process.pid) is removes
