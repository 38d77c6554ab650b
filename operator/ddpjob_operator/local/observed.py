"""The view of a run that is displayed: one value, rebuilt whenever something changed, and its parts as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Goodput, Progress, SnapshotStatus
from ddpjob_operator.core.ledger.ranks import NO_REPORTS, Reports, milliseconds, slowest_first, slowest_of
from ddpjob_operator.core.values.observed import PodPhase

_MOST_RANKS = 5
_MOST_NODES = 16
"""Of which a view has rows."""
_MOST_STATES = 4
"""Of nodes without a row that are named."""
_NOTICED_SHARE = 0.05
"""The least share of the time that an activity must have had to be named."""

_ACTIVITIES = (
    "training", "queued", "pulling", "initializing", "rendezvous", "first_step", "validating", "saving", "stalled",
    "recovering", "unknown",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the gang."""

    node_rank: int | None
    """None for a spare."""

    pod: str
    phase: str
    pid: int | None
    step: int | None
    doing: str
    """The phase that its lowest rank reports, such as rendezvous, train or save."""

    log: Path | None
    """Its file, on this machine."""

    host: str | None = None
    """The Kubernetes node of the pod, on a cluster."""


@dataclass(frozen=True, slots=True)
class RunView:
    """The job and its nodes at one moment."""

    job: str
    status: DDPJobStatus
    nodes: tuple[NodeView, ...]
    started: datetime
    now: datetime
    stopping: bool = False
    reports: Reports = NO_REPORTS
    """What the ranks of the attempt say."""

    @property
    def phase(self) -> str:
        return "Stopping" if self.stopping else str(self.status.phase or "Pending")


def waiting_in_words(view: RunView) -> str | None:
    """What the run waits for before its next attempt, and how long; None if it does not."""
    until = view.status.restart_at
    if view.stopping or until is None or until <= view.now:
        return None
    seconds = seconds_in_words((until - view.now).total_seconds())
    return f"waiting {seconds} before attempt {view.status.attempt}, until {until:%H:%M:%S} UTC (restart.backoff)"


def progress_in_words(progress: Progress, now: datetime) -> str:
    """Such as `step 345/690 (50%), epoch 14, loss 0.0312, 5,230 samples/s, 4s left`."""
    parts = [step_in_words(progress)]
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.samples_per_second:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.eta is not None and progress.eta > now:
        parts.append(f"{seconds_in_words((progress.eta - now).total_seconds())} left")
    return ", ".join(parts)


def step_in_words(progress: Progress) -> str:
    step, total = progress.step or 0, progress.total_steps
    return f"step {step}/{total} ({step / total:.0%})" if total else f"step {step}"


def snapshot_in_words(snapshot: SnapshotStatus) -> str:
    return f"snapshot of step {snapshot.step}{', verified' if snapshot.verified else ''}"


def goodput_shares(goodput: Goodput | None) -> list[tuple[str, float, float]]:
    """Name, seconds and share of every activity that took a noticeable share of the time, the largest first."""
    if goodput is None:
        return []
    spent = {activity: float(getattr(goodput, activity)) for activity in _ACTIVITIES}
    whole = sum(spent.values())
    found = [
        (activity.replace("_", " "), seconds, seconds / whole)
        for activity, seconds in spent.items()
        if whole > 0 and seconds >= _NOTICED_SHARE * whole
    ]
    return sorted(found, key=lambda each: -each[1])


def goodput_in_words(goodput: Goodput | None) -> str:
    """Such as `goodput 82%, recovering 9%, saving 6%`; empty where no training step can be seen."""
    if goodput is None or goodput.ratio is None:
        return ""
    rest = [f"{name} {share:.0%}" for name, _, share in goodput_shares(goodput) if name != "training"]
    return ", ".join([f"goodput {goodput.ratio:.0%}", *rest])


@dataclass(frozen=True, slots=True)
class RankTable:
    """The ranks by step time, as cells and sentences; empty before any has made steps."""

    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """The slowest few."""
    rest: str = ""
    """How many more there are."""
    slowest: str = ""
    """Which one the others wait for, and why."""
    note: str = ""
    """Why some are missing."""


def nodes_shown(nodes: Sequence[NodeView]) -> tuple[tuple[NodeView, ...], str]:
    """As many as a view has room for, those that are neither ready nor done before others, and the rest in words."""
    if len(nodes) <= _MOST_NODES:
        return tuple(nodes), ""
    as_wanted = [node.doing == "ready" or node.phase == PodPhase.SUCCEEDED for node in nodes]
    chosen = set(sorted(range(len(nodes)), key=lambda place: as_wanted[place])[:_MOST_NODES])
    rest = Counter(node.doing or node.phase for place, node in enumerate(nodes) if place not in chosen)
    states = ", ".join(f"{count} {state}" for state, count in rest.most_common(_MOST_STATES))
    return tuple(nodes[place] for place in sorted(chosen)), f"and {rest.total()} more: {states}"


def rank_table(reports: Reports) -> RankTable:
    """What a view has room for, however many ranks there are."""
    timed = slowest_first([rank for rank in reports.ranks if rank.step_seconds])
    if not timed:
        return RankTable(note=reports.note)
    columns: dict[str, list[str]] = {
        "rank": [str(rank.rank) for rank in timed],
        "pod": [rank.pod for rank in timed],
        "step": ["" if rank.step is None else str(rank.step) for rank in timed],
        "step time": [milliseconds(rank.step_seconds) for rank in timed],
        "data wait": [milliseconds(rank.data_seconds) for rank in timed],
        "passes": [milliseconds(rank.passes_seconds) for rank in timed],
    }
    known = {heading: cells for heading, cells in columns.items() if any(cells)}
    found = slowest_of(timed)
    return RankTable(
        headings=tuple(known),
        rows=tuple(zip(*known.values(), strict=True))[:_MOST_RANKS],
        rest=_more([rank.step_seconds or 0.0 for rank in timed[_MOST_RANKS:]]),
        slowest="" if found is None else f"the others wait for rank {found.rank}: {found.reason}",
        note=reports.note,
    )


def _more(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    low, high = milliseconds(min(seconds)), milliseconds(max(seconds))
    return f"and {len(seconds)} more, {high if low == high else f'{low} to {high}'} a step"


def failure_in_words(failure: FailureStatus) -> str:
    """One line: what died, and why."""
    where = failure.pod_name or f"node {failure.node_rank}"
    first = failure.message.splitlines()[0] if failure.message else "no message"
    return f"{failure.reason} on {where}: {first}"


def success_in_words(status: DDPJobStatus) -> str:
    """Such as `Succeeded: 29 epochs, 690 steps, restarts 1, eval_accuracy 0.97`."""
    progress = status.progress or Progress()
    parts = []
    if progress.epoch is not None:
        parts.append(f"{progress.epoch} epoch{'' if progress.epoch == 1 else 's'}")
    if progress.step is not None:
        parts.append(f"{progress.step} step{'' if progress.step == 1 else 's'}")
    parts.append(f"restarts {status.restarts}")
    # those of the last epoch are not the run's result
    results = {name: value for name, value in (progress.metrics or {}).items() if not name.startswith("epoch_")}
    parts += [f"{name} {value:.4g}" for name, value in sorted(results.items())]
    return f"Succeeded: {', '.join(parts)}"


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """`values` as one character each, from the first to the last of `levels`; means of them where there are more than
    `width`. Values that are not finite are left out.
    """
    finite = [value for value in values if isfinite(value)]
    columns = min(width, len(finite))
    cuts = [len(finite) * column // columns for column in range(columns + 1)] if columns else [0]
    means = [fmean(finite[start:end]) for start, end in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


def short(path: Path) -> str:
    """As a person in the current folder would type it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def seconds_in_words(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{left:02}s" if minutes else f"{left}s"
