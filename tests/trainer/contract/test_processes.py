"""Signals to the processes of a pod, and which of them end by themselves."""

from __future__ import annotations

import os
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
