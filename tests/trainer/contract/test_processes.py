"""Signals to the processes of a pod."""

from __future__ import annotations

import os
import signal

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
