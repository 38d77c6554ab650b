"""What a benchmark found: a cost beside its floor, or a time beside its bound, and whether the target is met.

Both sides of a ratio are measured in the same run, in turns, so that a busy machine slows both. The ratio is the
median of the rounds' own ratios. Seconds of the processor stand beside those of the clock: where other programs take
the cores, the clock measures them too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddp_trainer.contract import processes


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the clock and of the processor, all threads and processes together."""

    clock: float
    processor: float

    def __truediv__(self, parts: float) -> Cost:
        return Cost(self.clock / parts, self.processor / parts)


def measured(act: Callable[[], object]) -> Cost:
    """What `act` costs in this process."""
    clock, processor = time.perf_counter(), time.process_time()
    act()
    return Cost(time.perf_counter() - clock, time.process_time() - processor)


def processor_seconds(root: int) -> float:
    """What a process and all that it ever started have taken so far, those included that have ended."""
    return sum(_processor_seconds(pid) for pid in (root, *processes.descendants(root)))


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # ended meanwhile: then its parent has what it took
        return 0.0
    # utime, stime, and those of the children that were waited for (proc_pid_stat(5))
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ratio:
    """`costs` beside the `floors` of the same rounds; the clock's ratio may be `most`."""

    what: str
    floor: str
    costs: Sequence[Cost]
    floors: Sequence[Cost]
    most: float

    @property
    def value(self) -> float:
        return statistics.median(cost.clock / floor.clock for cost, floor in zip(self.costs, self.floors, strict=True))

    @property
    def of_processor(self) -> float:
        return statistics.median(
            cost.processor / floor.processor for cost, floor in zip(self.costs, self.floors, strict=True)
        )

    @property
    def is_met(self) -> bool:
        return self.value <= self.most

    def row(self) -> tuple[str, ...]:
        return (
            self.what,
            _median(self.costs),
            f"{_median(self.floors)} {self.floor}",
            f"{self.value:.3f}",
            f"{self.most:g}",
            f"{self.of_processor:.3f}",
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """`seconds` of the rounds, of which none may be more than `most`; `rule` says where the bound comes from."""

    what: str
    rule: str
    seconds: Sequence[float]
    most: float

    @property
    def is_met(self) -> bool:
        return max(self.seconds) <= self.most

    def row(self) -> tuple[str, ...]:
        spread = f"{statistics.median(self.seconds):.2f} s (at most {max(self.seconds):.2f})"
        return (self.what, spread, self.rule, "", f"{self.most:g} s", "")


Finding = Ratio | Bound


def report(findings: Sequence[Finding]) -> int:
    """Print one table; the exit code is 1 if a target is missed."""
    table = Table(title="medians; seconds of the clock, in parentheses of the processor")
    for column, right in (("", False), ("cost", True), ("beside", False), ("ratio", True), ("target", True)):
        table.add_column(column, justify="right" if right else "left")
    table.add_column("processor's ratio", justify="right")
    table.add_column("verdict")
    for finding in findings:
        table.add_row(*finding.row(), "[green]met" if finding.is_met else "[bold red]missed")
    Console(width=150).print(table)
    return 0 if all(finding.is_met for finding in findings) else 1


def _median(costs: Sequence[Cost]) -> str:
    clock = statistics.median(cost.clock for cost in costs)
    processor = statistics.median(cost.processor for cost in costs)
    digits = 4 if clock < 1 else 2
    return f"{clock:.{digits}f} ({processor:.{digits}f})"
