"""A job as it goes on, in a notebook: one output that is replaced whenever something has changed.

IPython is no dependency. In its kernel it has been imported before us, and where it has not there is nobody to show
HTML to.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any, Self

from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.local.display import Display, display_for
from ddpjob_operator.local.observed import (
    RunView,
    failure_in_words,
    goodput_in_words,
    nodes_shown,
    progress_in_words,
    rank_table,
    seconds_in_words,
    snapshot_in_words,
    sparkline,
    waiting_in_words,
)

_MOST_LINES = 5
_MOST_LOSSES = 2048
_SPARKLINE = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = {"Running": "#1a7f37", "Succeeded": "#1a7f37", "Failed": "#cf222e", "Restarting": "#9a6700"}


def display_here() -> Display:
    """In a notebook an output that is replaced, on a terminal a live view, elsewhere lines."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return NotebookDisplay() if getattr(shell, "kernel", None) is not None else display_for(sys.stdout)


class NotebookDisplay:
    """One output of the cell that was running when it began."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._losses: dict[int, float] = {}
        self._view: RunView | None = None
        self._shown: dict[str, str] = {}
        self._output: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def show(self, view: RunView) -> None:
        self._view = view
        progress = view.status.progress
        if progress is not None and progress.step is not None and progress.loss is not None:
            self._losses[progress.step] = progress.loss
            if len(self._losses) > _MOST_LOSSES:
                self._losses = dict(sorted(self._losses.items())[::2])
        self._replace()

    def event(self, event: Event) -> None:
        self.write_line(f"{event.reason}: {event.message}")

    def write_line(self, line: str) -> None:
        self._lines.append(line)
        self._replace()

    def output(self, line: str) -> None:
        """What the ranks print has its own cell: `for line in job.logs()`."""

    def _replace(self) -> None:
        if self._view is None:
            return
        losses = sparkline([loss for _, loss in sorted(self._losses.items())], _SPARKLINE, _LEVELS)
        content = {
            "text/plain": f"{self._view.job}: {self._view.phase}",
            "text/html": html_of(self._view, losses, tuple(self._lines)),
        }
        if content == self._shown:
            return
        self._shown = content
        if self._output is None:
            self._output = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


def html_of(view: RunView, losses: str = "", lines: tuple[str, ...] = ()) -> str:
    """The whole job, in a few lines: header, progress, the course of the loss, goodput, nodes, the slowest ranks, the
    last failure, events.
    """
    status = view.status
    parts = [_header(view)]
    if (waiting := waiting_in_words(view)) is not None:
        parts.append(_line(waiting))
    progress = status.progress
    if progress is not None and progress.step is not None:
        words = progress_in_words(progress, view.now)
        if progress.total_steps:
            bar = f'<progress aria-label="steps" value="{progress.step}" max="{progress.total_steps}"></progress> '
            parts.append(f"<div>{bar}{escape(words)}</div>")
        else:
            parts.append(_line(words))
    if len(losses) > 1:
        parts.append(f'<div><span aria-hidden="true">{escape(losses)}</span> loss</div>')
    if status.snapshot is not None:
        parts.append(_line(snapshot_in_words(status.snapshot)))
    parts.append(_line(goodput_in_words(status.goodput)))
    parts.append(_nodes(view))
    parts.append(_ranks(view))
    if status.last_failure is not None:
        parts.append(_line(f"last failure: {failure_in_words(status.last_failure)}"))
        parts.append(_line(status.last_failure.advice))
    parts += map(_line, lines)
    return "".join(parts)


def _header(view: RunView) -> str:
    spent = seconds_in_words((view.now - view.started).total_seconds())
    phase = f'<b style="color:{_COLOURS.get(view.phase, "inherit")}">{escape(view.phase)}</b>'
    counts = f"attempt {view.status.attempt}, restarts {view.status.restarts}, {spent}"
    return f"<div><b>{escape(view.job)}</b> {phase} {counts}</div>"


def _nodes(view: RunView) -> str:
    shown, rest = nodes_shown(view.nodes)
    rows = [
        ("spare" if node.node_rank is None else str(node.node_rank), node.pod, node.phase, node.doing, node.host or "")
        for node in shown
    ]
    return _table(("node", "pod", "phase", "doing", "on"), rows) + _line(rest)


def _ranks(view: RunView) -> str:
    ranks = rank_table(view.reports)
    return _table(ranks.headings, ranks.rows) + "".join(map(_line, (ranks.rest, ranks.slowest, ranks.note)))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _line(text: str) -> str:
    return f"<div>{escape(text)}</div>" if text else ""
