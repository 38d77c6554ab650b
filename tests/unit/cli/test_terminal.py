"""Styles and width of standard output: those of a terminal, and none elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from ddpjob_operator.cli.terminal import Style, numbered, print_line, styled, width
from ddpjob_operator.follow.lines import Line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_has_a_width_and_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    assert width() == 60
    assert styled("old", Style.DIM) == "\x1b[2mold\x1b[0m"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_a_terminal_that_is_to_be_plain_is(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert styled("old", Style.DIM) == "old"


def test_a_pipe_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert width() is None
    assert styled("old", Style.DIM) == "old"


def test_each_rank_has_a_colour_on_a_terminal_and_none_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    for rank in (0, 1):
        print_line(Line("", 0, rank, "step 1"))
    assert sys.stdout.getvalue() == "\x1b[36m[rank 0]\x1b[0m step 1\n\x1b[33m[rank 1]\x1b[0m step 1\n"  # type: ignore[attr-defined]
    assert numbered("x", 3) == numbered("x", 13)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_line(Line("", 0, 0, "step 1"))
    assert sys.stdout.getvalue() == "[rank 0] step 1\n"  # type: ignore[attr-defined]
