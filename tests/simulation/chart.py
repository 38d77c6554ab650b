"""The two pictures of docs/goodput.md, as SVG that follows a light or dark system."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

STYLE = """\
svg { --ground: #ffffff; --text: #1b1d21; --soft: #5a5e66; --rule: #d5d5d0; --one: #1d5bb8; --two: #a13d8f; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #191c20; --text: #e9ebee; --soft: #a3a9b3; --rule: #3a4047; --one: #82b1ff; --two: #e78fd6; }
}
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--text); }
.soft { fill: var(--soft); font-size: 12px; } .title { font-weight: 600; }
.rule { stroke: var(--rule); stroke-width: 1; } .ground { fill: var(--ground); }
.one { stroke: var(--one); fill: var(--one); } .two { stroke: var(--two); fill: var(--two); }
.range { stroke-width: 2; } .hollow { fill: var(--ground); stroke-width: 2; }
.curve { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 6 4; }"""

MIDDLE, END = "middle", "end"


@dataclass(frozen=True, slots=True)
class Mark:
    """Runs with different seeds, at one place of a chart."""

    values: tuple[float, ...]
    hollow: bool = False
    """Drawn as a ring, and not as a disc."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def by_scope(panels: Sequence[tuple[str, Sequence[tuple[str, Mark, Mark]]]], names: tuple[str, str]) -> str:
    """Goodput in panels side by side: for each restart scope a disc and a ring, which `names` explains."""
    left, width, row, top = 150.0, 280.0, 44.0, 74.0
    rows = len(panels[0][1])
    values = [value for _, scopes in panels for _, *marks in scopes for mark in marks for value in mark.values]
    low = math.floor(min(values) * 20) / 20
    bottom = top + rows * row
    shapes = [_key(left, 24, names[0], hollow=False), _key(left + 250, 24, names[1], hollow=True)]
    for index, (title, scopes) in enumerate(panels):
        begin = left + index * (width + 40)

        def x(value: float, begin: float = begin) -> float:
            return begin + (value - low) / (1.0 - low) * width

        shapes.append(_text(begin, top - 22, title, "title"))
        for tick in _ticks(low):
            shapes.append(_line(x(tick), top - 10, x(tick), bottom, "rule"))
            shapes.append(_text(x(tick), bottom + 18, f"{tick:.2f}", "soft", MIDDLE))
        for number, (scope, *marks) in enumerate(scopes):
            y = top + number * row + row / 2
            if index == 0:
                shapes.append(_text(left - 12, y + 4, scope, anchor=END))
            for mark, shift in zip(marks, (-8.0, 8.0), strict=True):
                shapes.append(_mark(mark, x, y + shift))
    shapes.append(_text(left, bottom + 40, "Goodput: share of 54 days spent on kept steps (median and range)", "soft"))
    return _svg(left + len(panels) * (width + 40), bottom + 54, "Goodput by restart scope", shapes)


def by_interval(
    points: Sequence[tuple[float, Mark]],
    curves: Sequence[tuple[str, str, Callable[[float], float]]],
    optimum: tuple[str, float],
) -> str:
    """Goodput by snapshot interval (logarithmic): simulated points, and curves with a name and a class each."""
    left, top, width, height = 64.0, 60.0, 620.0, 300.0
    first, last = points[0][0] / 1.3, points[-1][0] * 1.3
    sampled = [first * (last / first) ** (step / 120) for step in range(121)]
    values = [value for _, mark in points for value in mark.values]
    values += [curve(interval) for _, _, curve in curves for interval in sampled]
    low, high = math.floor(min(values) * 20) / 20, min(1.0, math.ceil(max(values) * 20) / 20)

    def x(interval: float) -> float:
        return left + math.log(interval / first) / math.log(last / first) * width

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * height

    shapes = [_key(left, 24, "simulated, scope Gang", hollow=False)]
    for tick in range(round(low * 20), round(high * 20) + 1):
        shapes.append(_line(left, y(tick / 20), left + width, y(tick / 20), "rule"))
        shapes.append(_text(left - 8, y(tick / 20) + 4, f"{tick / 20:.2f}", "soft", END))
    for interval, _ in points:
        shapes.append(_text(x(interval), top + height + 18, f"{interval:.0f} s", "soft", MIDDLE))
    name, best = optimum
    shapes.append(_line(x(best), top, x(best), top + height, "rule"))
    shapes.append(_text(x(best), top - 8, name, "soft", MIDDLE))
    for index, (label, kind, curve) in enumerate(curves):
        path = " ".join(f"{x(interval):.1f},{y(curve(interval)):.1f}" for interval in sampled)
        shapes.append(f'<polyline class="curve {kind}" points="{path}"/>')
        begin = left + 190 + index * 190
        shapes.append(_line(begin, 20, begin + 28, 20, f"range {kind}"))
        shapes.append(_text(begin + 34, 24, label))
    for interval, mark in points:
        shapes.append(_upright(mark, x(interval), y))
    shapes.append(_text(left, top + height + 40, "Training between two snapshots; goodput is upwards", "soft"))
    return _svg(left + width + 20, top + height + 54, "Goodput by snapshot interval", shapes)


def _ticks(low: float) -> list[float]:
    step = 0.05 if low < 0.9 else 0.02 if low < 0.96 else 0.01
    if low < 0.7:
        step = 0.1
    count = math.floor((1.0 - low) / step + 1e-9)
    return [1.0 - index * step for index in range(count, -1, -1)]


def _mark(mark: Mark, x: Callable[[float], float], y: float) -> str:
    kind = "two" if mark.hollow else "one"
    span = _line(x(min(mark.values)), y, x(max(mark.values)), y, f"range {kind}")
    return span + _disc(x(mark.median), y, mark.hollow)


def _upright(mark: Mark, x: float, y: Callable[[float], float]) -> str:
    return _line(x, y(min(mark.values)), x, y(max(mark.values)), "range one") + _disc(x, y(mark.median), mark.hollow)


def _key(x: float, y: float, name: str, *, hollow: bool) -> str:
    return _disc(x + 6, y - 4, hollow) + _text(x + 18, y, name)


def _disc(x: float, y: float, hollow: bool) -> str:
    return f'<circle class="{"two hollow" if hollow else "one"}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    attributes = f' class="{kind}"' if kind else ""
    return f'<text{attributes} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: float, height: float, title: str, shapes: Sequence[str]) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    parts = [opening, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    parts.append('<rect class="ground" width="100%" height="100%" rx="6"/>')
    return "\n".join([*parts, *shapes, "</svg>"]) + "\n"
