"""How a run is shown: a live picture on a terminal, one line a change everywhere else.

Training goes on when nobody can read any more (the terminal was closed, the pipe's reader went away).
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob_operator.api.status import Progress
from ddpjob_operator.core.ledger.ranks import slowest_of
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.local.observed import (
    NodeView,
    RankTable,
    RunView,
    failure_in_words,
    goodput_in_words,
    goodput_shares,
    nodes_shown,
    progress_in_words,
    rank_table,
    seconds_in_words,
    short,
    snapshot_in_words,
    sparkline,
    waiting_in_words,
)

_STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
    "Stopping": "yellow",
}
_BAR_WIDTH = 40
_WIDE = 100
"""Columns of a terminal from which on progress has one line with its bar."""
_NAMES = ("pod", "on", "log")
"""Columns of tables, that may be long."""
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*#"
_MOST_LOSSES = 4096
_SECONDS_BETWEEN_LINES = 30.0
_LINES_A_RUN = 10


class Display(Protocol):
    """What the runner shows of a run, as a live picture or as lines."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: object) -> None: ...

    def show(self, view: RunView) -> None:
        """Something may have changed."""

    def event(self, event: Event) -> None:
        """The job changed its phase, in the operator's words."""

    def write_line(self, line: str) -> None:
        """One line for the person who runs the job."""

    def output(self, line: str) -> None:
        """One line that a rank has printed."""


def display_for(stream: TextIO) -> Display:
    """The live one if `stream` is a terminal that can move its cursor. FORCE_COLOR and TTY_COMPATIBLE, which CI sets,
    make rich take a file for a terminal.
    """
    console = Console(file=stream)
    is_live = stream.isatty() and console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if is_live else PlainDisplay(stream)


class PlainDisplay:
    """Lines without control characters, for a log file, a pipe or CI."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._snapshot: int | None = None
        self._failed_attempt: int | None = None
        self._waits_until: datetime | None = None
        self._last_part = 0
        self._last_line: datetime | None = None
        self._pace: tuple[object, ...] = ()
        self._pace_line: datetime | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def show(self, view: RunView) -> None:
        self._write_progress(view)
        waiting = waiting_in_words(view)
        if waiting is not None and view.status.restart_at != self._waits_until:
            self._waits_until = view.status.restart_at
            self.write_line(waiting)
        snapshot = view.status.snapshot
        if snapshot is not None and snapshot.step != self._snapshot:
            self._snapshot = snapshot.step
            self.write_line(snapshot_in_words(snapshot))
        failure = view.status.last_failure
        if failure is not None and failure.attempt != self._failed_attempt:
            self._failed_attempt = failure.attempt
            if failure.advice:
                self.write_line(f"  {failure.advice}")

    def event(self, event: Event) -> None:
        self.write_line(f"{event.reason}: {event.message}")

    def write_line(self, line: str) -> None:
        with suppress(OSError):
            print(without_controls(line), file=self._stream, flush=True)

    def output(self, line: str) -> None:
        self.write_line(f"| {line}")

    def _write_progress(self, view: RunView) -> None:
        """Ten lines a run, and one each half minute where a run is long or its length unknown."""
        progress = view.status.progress
        if progress is None or not progress.step:
            return
        part = progress.step * _LINES_A_RUN // progress.total_steps if progress.total_steps else 0
        quiet = (view.now - (self._last_line or view.started)).total_seconds()
        if part <= self._last_part and quiet < _SECONDS_BETWEEN_LINES:
            return
        self._last_part, self._last_line = max(part, self._last_part), view.now
        self.write_line(progress_in_words(progress, view.now))
        self._write_pace(view)

    def _write_pace(self, view: RunView) -> None:
        """Where the time goes and which rank is slow, below a line of progress, where that is another than before."""
        if (view.now - (self._pace_line or view.started)).total_seconds() < _SECONDS_BETWEEN_LINES:
            return
        goodput, slowest = view.status.goodput, slowest_of(view.reports.ranks)
        pace = ({name for name, _, _ in goodput_shares(goodput)}, slowest and slowest.rank, view.reports.note)
        if pace == self._pace:
            return
        self._pace, self._pace_line = pace, view.now
        table = rank_table(view.reports)
        for line in filter(None, (goodput_in_words(goodput), table.slowest, table.note)):
            self.write_line(f"  {line}")


class LiveDisplay:
    """One picture that stays in place; lines scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: RunView | None = None
        self._shown_at = 0.0
        self._losses: dict[int, float] = {}
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._picture)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with suppress(OSError):
            self._live.stop()

    def show(self, view: RunView) -> None:
        self._view, self._shown_at = view, time.monotonic()
        progress = view.status.progress
        if progress is not None and progress.step is not None and progress.loss is not None:
            self._losses[progress.step] = progress.loss
            if len(self._losses) > _MOST_LOSSES:
                self._losses = dict(sorted(self._losses.items())[::2])

    def event(self, event: Event) -> None:
        text = without_controls(f"{event.reason}: {event.message}")
        self._print(Text(text, style="yellow" if event.type == "Warning" else "dim"))

    def write_line(self, line: str) -> None:
        self._print(Text(without_controls(line)))

    def output(self, line: str) -> None:
        self._print(Text(without_controls(line), style="dim"))

    def _picture(self) -> RenderableType:
        """Drawn four times a second, so that the time goes on while nothing else happens."""
        if self._view is None:
            return Text()
        losses = [loss for _, loss in sorted(self._losses.items())]
        levels = _LEVELS if self._console.encoding.startswith("utf") else _ASCII_LEVELS
        view = replace(self._view, now=self._view.now + timedelta(seconds=time.monotonic() - self._shown_at))
        return picture(view, sparkline(losses, _BAR_WIDTH, levels), wide=self._console.width >= _WIDE)

    def _print(self, text: Text) -> None:
        with suppress(OSError):
            self._console.print(text)


def picture(view: RunView, losses: str = "", *, wide: bool = True) -> RenderableType:
    """The whole run, in a few lines: header, progress, the course of the loss, goodput, nodes, the slowest ranks, the
    last failure.
    """
    parts: list[RenderableType] = [_header(view)]
    if (waiting := waiting_in_words(view)) is not None:
        parts.append(Text(waiting, style="yellow"))
    progress = view.status.progress
    if progress is not None and progress.step is not None:
        parts += _progress(progress, Text(progress_in_words(progress, view.now)), wide=wide)
        if len(losses) > 1:
            parts.append(Text.assemble(losses, ("  loss", "dim")))
    if view.status.snapshot is not None:
        parts.append(Text(snapshot_in_words(view.status.snapshot)))
    if goodput := goodput_in_words(view.status.goodput):
        parts.append(Text(goodput))
    if view.nodes:
        shown, rest = nodes_shown(view.nodes)
        parts.append(_nodes(shown))
        if rest:
            parts.append(Text(without_controls(rest), style="dim"))
    parts += _ranks(rank_table(view.reports))
    failure = view.status.last_failure
    if failure is not None:
        parts.append(Text(without_controls(f"last failure: {failure_in_words(failure)}"), style="yellow"))
        if failure.advice:
            parts.append(Text(f"  {without_controls(failure.advice)}", style="dim"))
    return Group(*parts)


def without_controls(text: str) -> str:
    """What a job says, without what a terminal would obey: rich leaves escape sequences as they are."""
    if text.isprintable():
        return text
    return "".join(character for character in text if character.isprintable() or character in "\t\n")


def _header(view: RunView) -> Text:
    spent = seconds_in_words((view.now - view.started).total_seconds())
    return Text.assemble(
        (view.job, "bold"),
        "  ",
        (view.phase, _STYLES.get(view.phase, "cyan")),
        f"  attempt {view.status.attempt}, restarts {view.status.restarts}, {spent}",
    )


def _progress(progress: Progress, words: Text, *, wide: bool) -> list[RenderableType]:
    """A bar where the end is known, beside the words or above them."""
    if not progress.total_steps:
        return [words]
    bar = ProgressBar(total=progress.total_steps, completed=progress.step or 0, width=_BAR_WIDTH)
    lines = Table.grid(padding=(0, 2))
    rows: list[list[RenderableType]] = [[bar, words]] if wide else [[bar], [words]]
    for row in rows:
        lines.add_row(*row)
    return [lines]


def _ranks(ranks: RankTable) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if ranks.rows:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ranks.headings:
            _add_column(table, heading, side="left" if heading == "pod" else "right")
        for cells in ranks.rows:
            table.add_row(*cells)
        parts.append(table)
    parts += [Text(line, style="dim") for line in (ranks.rest, ranks.note) if line]
    if ranks.slowest:
        parts.append(Text(ranks.slowest, style="yellow"))
    return parts


def _nodes(nodes: tuple[NodeView, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    local = any(node.log is not None for node in nodes)
    for name in ("node", "pod", "phase", "doing", *(("step", "pid", "log") if local else ("on",))):
        _add_column(table, name)
    for node in nodes:
        table.add_row(
            "spare" if node.node_rank is None else str(node.node_rank),
            node.pod,
            Text(node.phase, style=_STYLES.get(node.phase, "")),
            node.doing,
            *(_process(node) if local else (node.host or "",)),
        )
    return table


def _add_column(table: Table, name: str, side: JustifyMethod = "left") -> None:
    """A column of a live table: where the terminal is narrow, names are cut and figures stay."""
    table.add_column(name, overflow="fold" if name == "log" else "ellipsis", no_wrap=name not in _NAMES, justify=side)


def _process(node: NodeView) -> tuple[str, str, str]:
    step, pid = ("" if number is None else str(number) for number in (node.step, node.pid))
    return step, pid, "" if node.log is None else short(node.log)
