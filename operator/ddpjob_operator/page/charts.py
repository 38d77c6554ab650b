"""Loss and throughput over the steps, and the steps as a track, as geometry that a template draws as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import fmean, median

from ddpjob_operator.page.axis import Axis, Tick, compact, step_axis, value_axis, zero_axis
from ddpjob_operator.page.values import Course, LossPoint

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 44.0, 40.0
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
class StepChart:
    """Values over the steps. Geometry in the units of its viewBox."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    y_title: str
    """With its unit."""
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


def loss_chart(course: Course, width: float, height: float) -> StepChart | None:
    """The loss of the steps so far, at full width; None without two finite losses."""
    everything = (*course.kept, *course.lost, *course.validation)
    finite = [point.loss for point in everything if point.loss is not None]
    if len([point for point in course.kept if point.loss is not None]) < 2:
        return None
    steps = [point.step for point in everything]
    frame = _Frame(width, height)
    x, y = step_axis(min(steps), max(steps), frame.left, frame.right), value_axis(finite, frame.bottom, frame.top)
    return frame.chart(
        _Series(course.kept, course.lost, attrgetter("loss"), _loss_in_words),
        x,
        y,
        y_title="loss (logarithmic)" if y.logarithmic else "loss",
        validation=tuple(
            Mark(x.at(point.step), y.at(point.loss), f"step {point.step}: validation loss {point.loss:.4g}")
            for point in course.validation
            if point.loss is not None
        ),
        not_finite=tuple(
            Mark(x.at(point.step), frame.top, f"step {point.step}: the loss was not finite")
            for point in course.kept
            if point.loss is None
        )[:_MOST_HOVERS],
        summary=_losses_in_words(course.kept, course.lost),
    )


def throughput_chart(course: Course, width: float, height: float) -> StepChart | None:
    """The samples per second of the same steps, on an axis from 0; None without two steps that have it."""
    kept = [point for point in course.kept if point.samples_per_second is not None]
    lost = [point for point in course.lost if point.samples_per_second is not None]
    if len(kept) < 2:
        return None
    steps = [point.step for point in (*course.kept, *course.lost, *course.validation)]
    rates = [point.samples_per_second or 0.0 for point in (*kept, *lost)]
    frame = _Frame(width, height)
    # with the axis of the loss, so that what is above each other is of the same step
    x, y = step_axis(min(steps), max(steps), frame.left, frame.right), zero_axis(rates, frame.bottom, frame.top)
    series = _Series(kept, lost, attrgetter("samples_per_second"), _rate_in_words)
    return frame.chart(series, x, y, y_title="samples per second", summary=_rates_in_words(kept))


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
class _Series:
    """What is drawn of the steps."""

    kept: Sequence[LossPoint]
    lost: Sequence[LossPoint]
    of: Callable[[LossPoint], float | None]
    """The value of a step."""
    in_words: Callable[[LossPoint], str]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The room of a chart between its margins."""

    width: float
    height: float
    left: float = _LEFT
    top: float = _TOP

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    def chart(
        self,
        series: _Series,
        x: Axis,
        y: Axis,
        *,
        y_title: str,
        summary: str,
        validation: tuple[Mark, ...] = (),
        not_finite: tuple[Mark, ...] = (),
    ) -> StepChart:
        columns = _columns(series.kept, series.of, x)
        return StepChart(
            width=self.width,
            height=self.height,
            left=self.left,
            right=self.right,
            top=self.top,
            bottom=self.bottom,
            x_ticks=x.ticks(max(3, int(self.width / 120))),
            y_ticks=y.ticks(4),
            y_title=y_title,
            bands=_bands(series.kept, x),
            lines=tuple(_path(line, y) for line in _lines(columns)),
            spread=_spread(columns, y),
            lost=tuple(
                _path(line, y)
                for _, points in groupby(series.lost, key=lambda point: point.attempt)
                for line in _lines(_columns(tuple(points), series.of, x))
            ),
            validation=validation,
            not_finite=not_finite,
            hovers=_hovers(columns, series, x, y),
            summary=summary,
        )


@dataclass(frozen=True, slots=True)
class _Column:
    """The points that are drawn at one place."""

    points: tuple[LossPoint, ...]
    values: tuple[float, ...]
    """Those that they have."""
    x: float
    """Of the mean step."""

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None


def _columns(points: Sequence[LossPoint], of: Callable[[LossPoint], float | None], x: Axis) -> list[_Column]:
    """One for each point, or each few pixels where there are more points. None spans two attempts."""
    found = []
    for _, group in groupby(points, key=lambda point: (point.attempt, int(x.at(point.step) / _PIXELS_PER_COLUMN))):
        members = tuple(group)
        values = tuple(value for value in map(of, members) if value is not None)
        found.append(_Column(members, values, x.at(fmean(point.step for point in members))))
    return found


def _lines(columns: Sequence[_Column]) -> list[list[_Column]]:
    """Stretches that a line connects: it has a gap where there is no value."""
    return [list(group) for has, group in groupby(columns, key=lambda column: bool(column.values)) if has]


def _path(line: Sequence[_Column], y: Axis) -> str:
    places = [f"{column.x:g} {y.at(column.mean):g}" for column in line if column.mean is not None]
    # a path of one point is drawn as a dot by its round cap
    return f"M{places[0]}h0" if len(places) == 1 else "M" + "L".join(places)


def _spread(columns: Sequence[_Column], y: Axis) -> str:
    parts = []
    for line in _lines(columns):
        if any(len(column.values) > 1 for column in line):
            upper = [f"{column.x:g} {y.at(max(column.values)):g}" for column in line]
            lower = [f"{column.x:g} {y.at(min(column.values)):g}" for column in reversed(line)]
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


def _hovers(columns: Sequence[_Column], series: _Series, x: Axis, y: Axis) -> tuple[Hover, ...]:
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
        value = series.of(middle)
        text = f"step {middle.step}, {series.in_words(middle)}, attempt {middle.attempt}"
        at = y.at(value) if value is not None else None
        hovers.append(Hover(start, max(0.1, round(end - start, 1)), cursor, at, text))
    return tuple(hovers)


def _loss_in_words(point: LossPoint) -> str:
    return f"loss {point.loss:.4g}" if point.loss is not None else "loss not finite"


def _rate_in_words(point: LossPoint) -> str:
    return f"{compact(point.samples_per_second or 0.0)} samples/s"


def _losses_in_words(points: Sequence[LossPoint], lost: Sequence[LossPoint]) -> str:
    finite = [point for point in points if point.loss is not None]
    first, final = finite[0], finite[-1]
    least = min(finite, key=lambda point: point.loss or 0.0)
    words = (
        f"Training loss from {first.loss:.4g} at step {first.step} to {final.loss:.4g} at step {final.step}; "
        f"the least is {least.loss:.4g} at step {least.step}."
    )
    return f"{words} {len(lost)} steps were trained again." if lost else words


def _rates_in_words(points: Sequence[LossPoint]) -> str:
    least = min(points, key=lambda point: point.samples_per_second or 0.0)
    middle = median(point.samples_per_second or 0.0 for point in points)
    return (
        f"Throughput of all ranks: a median of {compact(middle)} samples/s, {_rate_in_words(points[-1])} at step "
        f"{points[-1].step}; the least is {_rate_in_words(least)} at step {least.step}."
    )
