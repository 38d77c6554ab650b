"""What the trainer says in the process of a script, which may have put a function of its own in place of `print`."""

from __future__ import annotations

import ast
import io
import os
import sys
from pathlib import Path

import pytest

import ddp_trainer
from ddp_trainer.contract import open_files
from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import EXIT_PREEMPTED
from ddp_trainer.contract.standard_error import say
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank import stop_request
from ddp_trainer.rank.world import World

TRAINER = Path(ddp_trainer.__file__).parent
OF_SCRIPTS = ("client", "live", "integrations")
"""Packages whose functions scripts call."""


def test_a_script_that_replaces_print_silences_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.print", lambda *values, **options: None)
    say("ddp_trainer: a rank is lost")
    assert capsys.readouterr().err == "ddp_trainer: a rank is lost\n"


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class Unflushed:
    """In the place of a stream, as that of a logger."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize("stream", [_closed(), Unflushed(), None], ids=["closed", "without flush", "none"])
def test_no_line_ends_a_script_that_has_closed_its_streams_or_replaced_them(
    stream: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(open_files, "write_out", lambda **_: None)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    say("ddp_trainer: a rank is lost")
    RunLog(JobEnvironment("digits", "u", 1, 0, 1, tmp_path, "100steps", 3), World()).print_line("step 1 of 2")
    stop_request._exit_preempted()
    assert ends == [EXIT_PREEMPTED]
    if isinstance(stream, Unflushed):
        assert stream.text == "ddp_trainer: a rank is lost\nstep 1 of 2\n"


@pytest.mark.parametrize("package", OF_SCRIPTS)
def test_no_module_that_scripts_use_calls_print(package: str) -> None:
    calls = [
        f"{file.relative_to(TRAINER)}:{node.lineno}"
        for file in sorted((TRAINER / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == [], "use ddp_trainer.contract.standard_error.say"
