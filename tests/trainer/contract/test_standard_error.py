"""What the trainer says in the process of a script, which may have put a function of its own in place of `print`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_trainer
from ddp_trainer.contract.standard_error import say

TRAINER = Path(ddp_trainer.__file__).parent
OF_SCRIPTS = ("client", "live", "integrations")
"""Packages whose functions scripts call."""


def test_a_script_that_replaces_print_silences_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.print", lambda *values, **options: None)
    say("ddp_trainer: a rank is lost")
    assert capsys.readouterr().err == "ddp_trainer: a rank is lost\n"


@pytest.mark.parametrize("package", OF_SCRIPTS)
def test_no_module_that_scripts_use_calls_print(package: str) -> None:
    calls = [
        f"{file.relative_to(TRAINER)}:{node.lineno}"
        for file in sorted((TRAINER / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == [], "use ddp_trainer.contract.standard_error.say"
