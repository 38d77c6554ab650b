"""docs/goodput.md: its tables and pictures, from docs/goodput.json and the parameters, and from nothing else."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from tests.simulation import chart, young_daly
from tests.simulation.figures import JOBS, Point, Row, Size, daly_setting, read
from tests.simulation.parameters import SCOPES, SETTINGS, Parameters

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES = DOCS / "goodput.md", DOCS / "goodput.json"
BY_SCOPE, BY_INTERVAL = DOCS / "pictures/goodput-by-scope.svg", DOCS / "pictures/goodput-by-interval.svg"


def files() -> dict[Path, str]:
    """Each generated file and its text."""
    figures = read(json.loads(FIGURES.read_text()))
    rows, points = figures.rows, figures.points
    page = PAGE.read_text()
    tables = {
        "scopes": _scopes(rows),
        "intervals": _intervals(points),
        "sizes": _sizes(figures.sizes),
        "parameters": _parameters(),
    }
    for name, table in tables.items():
        page = _between(page, name, table)
    return {PAGE: page, BY_SCOPE: _picture_of_scopes(rows), BY_INTERVAL: _picture_of_intervals(points)}


def _between(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of `name`. Raises ValueError without them."""
    begin, end = f"<!-- {name}: written by python -m tests.simulation -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{PAGE.name} has no markers of {name}")
    return f"{before}{begin}{text}\n{end}{after}"


def _scopes(rows: Sequence[Row]) -> str:
    table = [
        "| Job | Size | Scope | Goodput, median (range) | Lost of 54 days | Recovery: process, node | Failures, of "
        "nodes | Recomputed steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    places = itertools.product(JOBS, (setting.name for setting in SETTINGS), SCOPES)
    return "\n".join([*table, *(_scope(*place, _runs(rows, *place)) for place in places)])


def _scope(job: str, setting: str, scope: str, runs: Sequence[Row]) -> str:
    goodputs = [row.goodput for row in runs]
    lost = (1.0 - statistics.median(goodputs)) * SETTINGS[0].days * 24
    ended = sorted({row.reason for row in runs if row.reason})
    recovery = ", ".join(
        _seconds(found) if (found := [value for value in column if value is not None]) else "–"
        for column in ([row.process_recovery for row in runs], [row.node_recovery for row in runs])
    )
    cells = (
        job, setting, scope + "".join(f" (failed: {reason})" for reason in ended), _range(goodputs), f"{lost:.1f} h",
        recovery, f"{_middle(row.failures for row in runs)}, {_middle(row.lost_nodes for row in runs)}",
        f"{_middle(row.lost_steps for row in runs)}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _runs(rows: Iterable[Row], *of: str) -> list[Row]:
    """Those of one job, setting and scope."""
    return [row for row in rows if (row.job, row.setting, row.scope) == of]


def _intervals(points: Sequence[Point]) -> str:
    setting, parameters = daly_setting()
    table = ["| Interval | Simulated, median (range) | Daly | Difference | Young |", "|---|---|---|---|---|"]
    for interval in sorted({point.interval for point in points}):
        runs = [point for point in points if point.interval == interval]
        given = (setting.mtbf_seconds, interval, parameters.stall_seconds, _recovery(points))
        simulated, daly = statistics.median(run.goodput for run in runs), young_daly.goodput(*given)
        cells = (
            f"{interval:.0f} s", _range([run.goodput for run in runs]), f"{daly:.4f}", f"{simulated - daly:+.4f}",
            f"{young_daly.young_goodput(*given):.4f}",
        )  # fmt: skip
        table.append(f"| {' | '.join(cells)} |")
    best = young_daly.daly_interval(setting.mtbf_seconds, parameters.stall_seconds)
    young = young_daly.young_interval(setting.mtbf_seconds, parameters.stall_seconds)
    table.append(
        f"\nMTBF {setting.mtbf_seconds:.0f} s, stall {parameters.stall_seconds:g} s; recovery {_recovery(points):.0f} s"
        f", as simulated.\nThe best interval is {best:.0f} s by Daly and {young:.0f} s by Young."
    )
    return "\n".join(table)


def _sizes(sizes: Sequence[Size]) -> str:
    table = ["| Scope | Pods | Goodput | Recovery: process, node | Failures |", "|---|---|---|---|---|"]
    for size in sizes:
        times = (size.process_recovery, size.node_recovery)
        recovery = ", ".join("–" if seconds is None else f"{seconds:.0f} s" for seconds in times)
        table.append(f"| {size.scope} | {size.pods:,} | {size.goodput:.4f} | {recovery} | {size.failures} |")
    return "\n".join(table)


def _parameters() -> str:
    table = ["| Parameter | fast | slow | Source |", "|---|---|---|---|"]
    sources = _docstrings(Parameters)
    for item in fields(Parameters):
        values = (f"{getattr(job, item.name):.4g}" for job in JOBS.values())
        table.append(f"| `{item.name}` | {' | '.join(values)} | {sources[item.name]} |")
    table.append("\n| Size | MTBF | Source | Rendezvous | Simulated |\n|---|---|---|---|---|")
    for setting in SETTINGS:
        of = f"{setting.pods} pods" + (f", each for {setting.nodes_per_pod} nodes" if setting.nodes_per_pod > 1 else "")
        cells = (
            setting.name, f"{setting.mtbf_seconds / 3600:.2f} h", setting.source, f"{setting.rendezvous_seconds:g} s",
            of,
        )  # fmt: skip
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def _docstrings(of: type) -> dict[str, str]:
    """By field, the text below it in the source."""
    source = (Path(__file__).parent / "parameters.py").read_text().partition(f"class {of.__name__}:")[2]
    source = source.partition("\n@dataclass")[0]
    found = re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', source, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def _picture_of_scopes(rows: Sequence[Row]) -> str:
    panels = []
    for setting in SETTINGS:
        scopes = []
        for scope in SCOPES:
            fast, slow = (
                chart.Mark(
                    tuple(
                        row.goodput for row in rows if (row.job, row.setting, row.scope) == (job, setting.name, scope)
                    ),
                    hollow=job == "slow",
                )
                for job in ("fast", "slow")
            )
            scopes.append((scope, fast, slow))
        panels.append((f"{setting.name}, MTBF {setting.mtbf_seconds / 3600:.1f} h", scopes))
    return chart.by_scope(panels, ("fast: a snapshot each minute", "slow: 5 min to start, a snapshot each half hour"))


def _picture_of_intervals(points: Sequence[Point]) -> str:
    setting, parameters = daly_setting()
    mtbf, stall, recovery = setting.mtbf_seconds, parameters.stall_seconds, _recovery(points)
    marks = [
        (interval, chart.Mark(tuple(point.goodput for point in points if point.interval == interval)))
        for interval in sorted({point.interval for point in points})
    ]
    best = young_daly.daly_interval(mtbf, stall)
    return chart.by_interval(
        marks,
        (
            ("Daly 2006", "one", lambda interval: young_daly.goodput(mtbf, interval, stall, recovery)),
            ("first order (Young)", "two dashed",
             lambda interval: young_daly.young_goodput(mtbf, interval, stall, recovery)),
        ),
        (f"best by Daly: {best:.0f} s", best),
    )  # fmt: skip


def _recovery(points: Iterable[Point]) -> float:
    return statistics.median(point.recovery for point in points)


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} s"


def _middle(values: Iterable[int]) -> int:
    return round(statistics.median(values))
