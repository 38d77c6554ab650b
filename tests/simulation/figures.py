"""What the simulation measures, as plain values for docs/goodput.json: one row for each job, restart scope and seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.simulation import model
from tests.simulation.parameters import FAST, INTERVALS, SCOPES, SETTINGS, SLOW, Parameters, Setting

MOST_PODS = 1024
"""Of a spec."""

JOBS = {"fast": FAST, "slow": SLOW}


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated run. Times in seconds."""

    job: str
    """`fast` or `slow` (parameters.py)."""
    setting: str
    scope: str
    seed: int
    goodput: float
    failures: int
    lost_nodes: int
    restarts: int
    disruptions: int
    lost_steps: int
    process_recovery: float | None
    """Median, from the end of a process to the next step begun; None where training went on."""
    node_recovery: float | None
    """The same for lost nodes."""
    reason: str
    """Why the job failed, if it did."""


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated run of scope Gang with its own snapshot interval. Times in seconds."""

    interval: float
    seed: int
    goodput: float
    """Counted from the first step, as Daly's formula is."""
    recovery: float
    """Median, from a failure to the next step begun."""
    failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class Size:
    """Two days of the largest job, as many simulated pods as `pods`. Times in seconds."""

    scope: str
    pods: int
    goodput: float
    failures: int
    process_recovery: float | None
    """Median, from the end of a process to the next step begun; None where training went on."""
    node_recovery: float | None
    """The same for lost nodes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All that docs/goodput.json has."""

    rows: list[Row]
    points: list[Point]
    sizes: list[Size]


def daly_setting() -> tuple[Setting, Parameters]:
    """What is compared with Daly's formula: the largest job, whose processes fail one at a time, with snapshots that
    are safe when training goes on. The scheduler and the operator are not in the formula, so few pods do.
    """
    largest = SETTINGS[-1]
    setting = replace(_with_pods(largest, 4), days=27.0)
    return setting, replace(SLOW, save_seconds=0.0, lost_node_share=0.0)


def measure(seeds: Iterable[int], say: Callable[[str], None]) -> dict[str, Any]:
    """All figures, for these seeds. `say` gets a line for each run."""
    seeds = tuple(seeds)
    rows = [
        _row(job, setting, scope, seed, say)
        for job in JOBS
        for setting in SETTINGS
        for scope in SCOPES
        for seed in seeds
    ]
    points = [_point(interval, seed, say) for interval in INTERVALS for seed in seeds]
    found: dict[str, Sequence[Any]] = {"rows": rows, "points": points, "sizes": measure_sizes(say)}
    return {name: [asdict(figure) for figure in figures] for name, figures in found.items()}


def measure_sizes(say: Callable[[str], None]) -> list[Size]:
    """The same two days of the largest job with few pods and with as many as a spec may have."""
    return [_size(scope, pods, say) for scope in SCOPES for pods in (MOST_PODS, SETTINGS[-1].pods)]


def read(figures: dict[str, Any]) -> Figures:
    """The values of docs/goodput.json."""
    return Figures(
        [Row(**row) for row in figures["rows"]],
        [Point(**point) for point in figures["points"]],
        [Size(**size) for size in figures["sizes"]],
    )


def goodput_after_start(result: model.Result, step_seconds: float) -> float:
    """Seconds of kept steps, divided by the time since the first step began."""
    return result.kept_steps * step_seconds / (result.seconds - result.startup_seconds)


def _row(job: str, setting: Setting, scope: str, seed: int, say: Callable[[str], None]) -> Row:
    pods = setting if job == "fast" else _with_pods(setting, 16)
    result = model.simulate(pods, scope, seed, JOBS[job])
    say(f"{job} {setting.name} {scope}, seed {seed}: {result.goodput:.4f}")
    return Row(
        job, setting.name, scope, seed, round(result.goodput, 5), result.failures, result.lost_nodes, result.restarts,
        result.disruptions, result.lost_steps, _median(result, of_node=False), _median(result, of_node=True),
        result.reason,
    )  # fmt: skip


def _size(scope: str, pods: int, say: Callable[[str], None]) -> Size:
    result = model.simulate(replace(_with_pods(SETTINGS[-1], pods), days=2.0), scope, 1, FAST)
    say(f"two days of {pods} pods, {scope}: {result.goodput:.4f}")
    recoveries = _median(result, of_node=False), _median(result, of_node=True)
    return Size(scope, pods, round(result.goodput, 5), result.failures, *recoveries)


def _median(result: model.Result, *, of_node: bool) -> float | None:
    """Of the seconds that recoveries took; None if training never stopped."""
    found = [recovery.seconds for recovery in result.recoveries if recovery.of_node is of_node]
    return round(statistics.median(found), 1) if found else None


def _with_pods(setting: Setting, pods: int) -> Setting:
    """The same job with another number of simulated pods."""
    return replace(setting, pods=pods, nodes_per_pod=setting.pods * setting.nodes_per_pod // pods)


def _point(interval: float, seed: int, say: Callable[[str], None]) -> Point:
    setting, parameters = daly_setting()
    parameters = replace(parameters, snapshot_every_seconds=interval)
    result = model.simulate(setting, "Gang", seed, parameters)
    goodput = goodput_after_start(result, parameters.step_seconds)
    say(f"a snapshot every {interval:.0f} s, seed {seed}: {goodput:.4f}")
    recovery = statistics.median(r.seconds for r in result.recoveries)
    return Point(interval, seed, round(goodput, 5), round(recovery, 2), result.failures, result.reason)
