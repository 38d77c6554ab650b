"""Axes of charts: where the ticks are, what they are labelled, and where a value is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SECOND_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_FAR = 0.3
"""Share of the last step."""
_LOG_RATIO = 50
"""From this ratio of the greatest to the least value on, an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis: where it is drawn, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where it is drawn; values beyond the ends are drawn at the end."""
        low, high, found = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, found = math.log10(low), math.log10(high), math.log10(found)
        share = (found - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, wanted: int) -> tuple[Tick, ...]:
        """About as many as wanted, at round values."""
        values = _decades(self.low, self.high) if self.logarithmic else _round_values(self.low, self.high, wanted)
        return tuple(Tick(self.at(value), compact(value)) for value in values)


def step_axis(first: int, last: int, start: float, end: float) -> Axis:
    """From 0 on, unless the first step is far from it."""
    low = first if first > _FAR * last else 0
    return Axis(low, max(low + 1, last), start, end)


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis on which all values are; logarithmic where they are of very different sizes."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= _LOG_RATIO:
        return Axis(low / 1.1, high * 1.1, start, end, logarithmic=True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # an axis of values that are never negative does not go below 0
    return Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)


def zero_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis from 0, on which half the length is half the value."""
    return Axis(0.0, max(values) * 1.06 or 1.0, start, end)


def time_ticks(seconds: float, start: float, end: float, wanted: int) -> tuple[Tick, ...]:
    """Ticks of an axis from 0 to so many seconds, with units."""
    axis = Axis(0, max(seconds, 1e-9), start, end)
    step = next(
        (step for step in _SECOND_STEPS if seconds / step <= wanted), math.ceil(seconds / wanted / 86400) * 86400
    )
    return tuple(Tick(axis.at(value), clock(value)) for value in range(0, int(seconds) + 1, step))


def clock(seconds: float) -> str:
    """Such as `0`, `45 s`, `10 min`, `1 h 30 min`, `2 d`."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (left, "s")) if count]
    return " ".join(parts[:2]) or "0"


def compact(value: float) -> str:
    """A number in few characters, such as `0.05`, `1.5`, `12,500`, `3M`, `1e-05`."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _round_values(low: float, high: float, wanted: int) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    raw = span / max(1, wanted)
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades <= 1.5 else (1, 3) if decades <= 3 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for e in exponents for f in factors if low <= (value := f * 10.0**e) <= high]
