"""The loss over the steps, and the steps as a track, as geometry that a template draws as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ddpjob_operator.page.axis import Axis, Tick, step_axis, value_axis
from ddpjob_operator.page.values import Course, LossPoint

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 24.0, 40.0
_PIXELS_PER_COLUMN = 3
_MOST_HOVERS = 120


@dataclass(frozen=True, slots=True)
class Band:
    """The steps of one attempt."""

    x: float
    width: float
    label: str
    title: str
    odd: bool


@dataclass(frozen=True, slots=True)
class Hover:
    """A strip that shows its values when the pointer is on it."""

    x: float
    width: float
    cursor: float
    y: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign at a place."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class LossChart:
    """Geometry in the units of its viewBox."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    y_title: str
    bands: tuple[Band, ...]
    lines: tuple[str, ...]
    """Paths of the means."""
    spread: str
    """Path of the area between the least and the greatest value of each column."""
    lost: tuple[str, ...]
    validation: tuple[Mark, ...]
    not_finite: tuple[Mark, ...]
    hovers: tuple[Hover, ...]
    summary: str
    """In words, for those who do not see it."""


@dataclass(frozen=True, slots=True)
class Track:
    """The steps of a run from 0 to the last, with what is on record of them."""

    width: float
    height: float
    left: float
    right: float
    y: float
    done: float
    """Where the current step is."""
    ticks: tuple[Tick, ...]
    snapshots: tuple[Mark, ...]
    failures: tuple[Mark, ...]


def loss_chart(course: Course, width: float, height: float) -> LossChart | None:
    """The chart of the steps so far, at full width; None without two finite losses."""
    everything = (*course.kept, *course.lost, *course.validation)
    finite = [point.loss for point in everything if point.loss is not None]
    if len([point for point in course.kept if point.loss is not None]) < 2:
        return None
    left, right, top, bottom = _LEFT, width - _RIGHT, _TOP, height - _BOTTOM
    steps = [point.step for point in everything]
    x, y = step_axis(min(steps), max(steps), left, right), value_axis(finite, bottom, top)
    columns = _columns(course.kept, x)
    return LossChart(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_ticks=x.ticks(max(3, int(width / 120))),
        y_ticks=y.ticks(4),
        y_title="loss (logarithmic)" if y.logarithmic else "loss",
        bands=_bands(course.kept, x),
        lines=tuple(_path(line, y) for line in _lines(columns)),
        spread=_spread(columns, y),
        lost=tuple(
            _path(line, y)
            for _, points in groupby(course.lost, key=lambda point: point.attempt)
            for line in _lines(_columns(tuple(points), x))
        ),
        validation=tuple(
            Mark(x.at(point.step), y.at(point.loss), f"step {point.step}: validation loss {point.loss:.4g}")
            for point in course.validation
            if point.loss is not None
        ),
        not_finite=tuple(
            Mark(x.at(point.step), top, f"step {point.step}: the loss was not finite")
            for point in course.kept
            if point.loss is None
        )[:_MOST_HOVERS],
        hovers=_hovers(columns, x, y),
        summary=_in_words(course.kept, course.lost),
    )


def track(
    step: int, total: int | None, snapshots: Iterable[int], failures: Iterable[tuple[int, str]], width: float
) -> Track:
    """A track to `total`, or to the current step where the total is unknown."""
    left, right, y = 8.0, width - 8.0, 22.0
    axis = step_axis(0, total or step, left, right)
    return Track(
        width=width,
        height=56,
        left=left,
        right=right,
        y=y,
        done=axis.at(step),
        ticks=axis.ticks(max(3, int(width / 110))),
        snapshots=tuple(Mark(axis.at(at), y, f"snapshot of step {at}") for at in sorted(set(snapshots))),
        failures=tuple(Mark(axis.at(at), y, f"{reason} at step {at}") for at, reason in failures),
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """The points that are drawn at one place."""

    points: tuple[LossPoint, ...]
    x: float
    """Of the mean step."""

    @property
    def losses(self) -> list[float]:
        return [point.loss for point in self.points if point.loss is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.losses) if self.losses else None


def _columns(points: Sequence[LossPoint], x: Axis) -> list[_Column]:
    """One for each point, or each few pixels where there are more points. None spans two attempts."""
    found = []
    for _, group in groupby(points, key=lambda point: (point.attempt, int(x.at(point.step) / _PIXELS_PER_COLUMN))):
        members = tuple(group)
        found.append(_Column(members, x.at(fmean(point.step for point in members))))
    return found


def _lines(columns: Sequence[_Column]) -> list[list[_Column]]:
    """Stretches that a line connects: it has a gap where the loss was not finite."""
    return [list(group) for finite, group in groupby(columns, key=lambda column: column.mean is not None) if finite]


def _path(line: Sequence[_Column], y: Axis) -> str:
    places = [f"{column.x:g} {y.at(column.mean):g}" for column in line if column.mean is not None]
    # a path of one point is drawn as a dot by its round cap
    return f"M{places[0]}h0" if len(places) == 1 else "M" + "L".join(places)


def _spread(columns: Sequence[_Column], y: Axis) -> str:
    parts = []
    for line in _lines(columns):
        if any(len(column.losses) > 1 for column in line):
            upper = [f"{column.x:g} {y.at(max(column.losses)):g}" for column in line]
            lower = [f"{column.x:g} {y.at(min(column.losses)):g}" for column in reversed(line)]
            parts.append("M" + "L".join((*upper, *lower)) + "Z")
    return "".join(parts)


def _bands(points: Sequence[LossPoint], x: Axis) -> tuple[Band, ...]:
    bands: list[Band] = []
    stretches = [(attempt, list(group)) for attempt, group in groupby(points, key=lambda point: point.attempt)]
    for index, (attempt, members) in enumerate(stretches):
        start = x.start if index == 0 else bands[-1].x + bands[-1].width
        end = x.at(members[-1].step)
        title = f"attempt {attempt}: steps {members[0].step} to {members[-1].step}"
        bands.append(Band(start, max(0.0, round(end - start, 1)), f"attempt {attempt}", title, index % 2 == 1))
    return tuple(bands)


def _hovers(columns: Sequence[_Column], x: Axis, y: Axis) -> tuple[Hover, ...]:
    size = max(1, -(-len(columns) // _MOST_HOVERS))
    groups = [columns[start : start + size] for start in range(0, len(columns), size)]
    hovers: list[Hover] = []
    for index, group in enumerate(groups):
        points = [point for column in group for point in column.points]
        middle = points[len(points) // 2]
        cursor = x.at(middle.step)
        start = x.start if index == 0 else hovers[-1].x + hovers[-1].width
        following = groups[index + 1][0].x if index + 1 < len(groups) else x.end
        end = (group[-1].x + following) / 2 if index + 1 < len(groups) else x.end
        loss = f"loss {middle.loss:.4g}" if middle.loss is not None else "loss not finite"
        text = f"step {middle.step}, {loss}, attempt {middle.attempt}"
        at = y.at(middle.loss) if middle.loss is not None else None
        hovers.append(Hover(start, max(0.1, round(end - start, 1)), cursor, at, text))
    return tuple(hovers)


def _in_words(points: Sequence[LossPoint], lost: Sequence[LossPoint]) -> str:
    finite = [point for point in points if point.loss is not None]
    first, final = finite[0], finite[-1]
    least = min(finite, key=lambda point: point.loss or 0.0)
    words = (
        f"Training loss from {first.loss:.4g} at step {first.step} to {final.loss:.4g} at step {final.step}; "
        f"the least is {least.loss:.4g} at step {least.step}."
    )
    return f"{words} {len(lost)} steps were trained again." if lost else words
