"""Panels of a Grafana dashboard as values, and the JSON that Grafana 10.1 and later read.

Only what the dashboards of this chart use. charts/dashboards.py has the panels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Steps = tuple[tuple[float, str], ...]
"""Colours from a value on; the first is that of all lower values too."""

WIDTH = 24
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "ddpjob"


@dataclass(frozen=True, slots=True)
class Query:
    """One query and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures in a table of jobs."""

    title: str
    expr: str
    unit: str = "short"
    steps: Steps = ()
    hidden: bool = False
    """The labels of this query are columns, and its values are not shown."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `help` says what it shows and what to do about it;"""

    title: str
    kind: Literal["stat", "timeseries", "bargauge", "state-timeline", "table"]
    help: str
    queries: Sequence[Query] = ()
    columns: Sequence[Column] = ()
    unit: str = "short"
    steps: Steps = ()
    width: int = 8
    height: int = 8
    stacked: bool = False
    bars: bool = False
    name_only: bool = False
    """A stat that shows the name of its series, not the value."""
    order: str = ""
    """The column that a table is sorted by, the greatest first; with a `+` before it, the least first."""
    empty: str = ""
    """What is shown instead of "No data"."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return tuple(item.expr for item in (*self.queries, *self.columns))


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the panels under it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: labels of a series, or a text."""

    name: str
    label: str
    query: str = ""
    many: bool = True
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of rows."""

    name: str
    title: str
    help: str
    rows: Sequence[Row]
    variables: Sequence[Variable]
    since: str = "now-6h"
    annotations: Sequence[Query] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)

    def json(self) -> str:
        """The file."""
        return json.dumps(_dashboard(self), indent=1, sort_keys=True) + "\n"


def _dashboard(page: Dashboard) -> Json:
    return {
        "uid": f"{TAG}-{page.name}",
        "title": f"DDPJob / {page.title}",
        "description": page.help,
        "tags": [TAG],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": page.since, "to": "now"},
        "links": [
            {
                "type": "dashboards", "title": "DDPJob", "tags": [TAG], "asDropdown": False, "icon": "dashboard",
                "includeVars": False, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
            }
        ],
        "templating": {"list": [_datasource(), *(_variable(item) for item in page.variables)]},
        "annotations": {"list": [_annotation(item) for item in page.annotations]},
        "panels": _laid_out(page.rows),
    }  # fmt: skip


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(item: Variable) -> Json:
    if item.text is not None:
        known = {"text": item.text, "value": item.text}
        return {
            "name": item.name, "label": item.label, "type": "textbox", "query": item.text, "hide": 0, "current": known,
            "options": [known | {"selected": True}],
        }  # fmt: skip
    found = {
        "name": item.name, "label": item.label, "type": "query", "datasource": SOURCE, "definition": item.query,
        "query": {"query": item.query, "refId": item.name}, "refresh": 2, "sort": 1, "hide": 0, "multi": item.many,
        "includeAll": item.many,
    }  # fmt: skip
    return found | ({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if item.many else {})


def _annotation(item: Query) -> Json:
    return {
        "name": item.legend, "titleFormat": item.legend, "enable": True, "iconColor": "orange", "datasource": SOURCE,
        "expr": item.expr, "step": "30s",
    }  # fmt: skip


def _laid_out(rows: Sequence[Row]) -> list[Json]:
    """Panels from left to right, below the heading of their row."""
    found: list[Json] = []
    top = 0
    for row in rows:
        found.append({
            "id": len(found) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
        })  # fmt: skip
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            found.append({"id": len(found) + 1, "gridPos": place, **_panel(panel)})
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return found


def _panel(panel: Panel) -> Json:
    targets = [_target(panel, item.expr, getattr(item, "legend", ""), n) for n, item in enumerate(_asked(panel))]
    defaults: Json = {"unit": panel.unit, "color": _color(panel)}
    if panel.steps:
        defaults["thresholds"] = _thresholds(panel.steps)
    if panel.empty:
        defaults["noValue"] = panel.empty
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        defaults["custom"] = _drawn(panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": [_override(item) for item in panel.columns] + _links(panel)},
        "options": _options(panel),
        **({"transformations": _as_one_table(panel)} if panel.kind == "table" else {}),
    }


def _color(panel: Panel) -> Json:
    if panel.kind == "timeseries" or not (panel.steps or panel.kind == "stat"):
        return {"mode": "palette-classic"}
    return {"mode": "thresholds"} if panel.steps else {"mode": "fixed", "fixedColor": "text"}


def _asked(panel: Panel) -> Sequence[Query | Column]:
    return panel.columns if panel.kind == "table" else panel.queries


def _target(panel: Panel, expr: str, legend: str, number: int) -> Json:
    now = panel.kind in ("stat", "bargauge", "table")
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": expr,
        "legendFormat": legend,
        "instant": now,
        "range": not now,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _thresholds(steps: Steps) -> Json:
    (_, lowest), *others = steps
    return {
        "mode": "absolute",
        "steps": [{"color": lowest, "value": None}, *({"color": color, "value": value} for value, color in others)],
    }


def _drawn(panel: Panel) -> Json:
    return {
        "drawStyle": "bars" if panel.bars else "line",
        "fillOpacity": 60 if panel.bars else 30 if panel.stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if panel.steps else "off"},
    }


def _options(panel: Panel) -> Json:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case "stat":
            shown = "name" if panel.name_only else "value_and_name" if len(panel.queries) > 1 else "value"
            return {
                "reduceOptions": reduce, "colorMode": "value", "graphMode": "none", "justifyMode": "auto",
                "orientation": "auto", "textMode": shown,
            }  # fmt: skip
        case "bargauge":
            return {"reduceOptions": reduce, "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True}
        case "state-timeline":
            return {"mergeValues": True, "showValue": "never", "rowHeight": 0.8, "legend": {"showLegend": False}}
        case "table":
            column = panel.order.removeprefix("+")
            order = [{"displayName": column, "desc": column == panel.order}] if column else []
            return {"showHeader": True, "footer": {"show": False}, "cellHeight": "sm", "sortBy": order}
        case _:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }


def _as_one_table(panel: Panel) -> list[Json]:
    """Rows of all queries with the same labels become one row; each query is a column with its title."""
    values = {f"Value #{chr(ord('A') + number)}": column for number, column in enumerate(panel.columns)}
    if len(panel.columns) == 1:
        values = {"Value": panel.columns[0]}  # Grafana numbers only the values of several queries
    hidden = {name: True for name, column in values.items() if column.hidden}
    titles = {name: column.title for name, column in values.items() if not column.hidden}
    order = {name: number for number, name in enumerate(("namespace", "ddpjob"))}
    return [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {"excludeByName": {"Time": True, **hidden}, "renameByName": titles, "indexByName": order},
        },
    ]


def _override(column: Column) -> Json:
    properties = [{"id": "unit", "value": column.unit}]
    if column.steps:
        properties += [
            {"id": "thresholds", "value": _thresholds(column.steps)},
            {"id": "color", "value": {"mode": "thresholds"}},
            {"id": "custom.cellOptions", "value": {"type": "color-text"}},
        ]
    return {"matcher": {"id": "byName", "options": column.title}, "properties": properties}


def _links(panel: Panel) -> list[Json]:
    """From the name of a job to its dashboard."""
    if panel.kind != "table":
        return []
    job = "var-cluster=${cluster}&var-namespace=${__data.fields.namespace}&var-ddpjob=${__data.fields.ddpjob}"
    url = f"/d/{TAG}-job?{job}&var-datasource=${{datasource}}&${{__url_time_range}}"
    link = {"title": "Open the job", "url": url, "targetBlank": False}
    return [{"matcher": {"id": "byName", "options": "ddpjob"}, "properties": [{"id": "links", "value": [link]}]}]
