"""The chart's alerts where an hour takes seconds: times in a rule are divided by a number, and nothing else changes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.prometheus import Prometheus

RULES = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files" / "alerts.yaml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]

_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"\b(\d+)([smh])\b")
_SECONDS = re.compile(r"(?<=[<>] )(300|1800|7200)\b")
"""What expressions compare seconds with: an age, or a sum of them."""

Fired = set[tuple[str, str]]
"""Alerts with the job, the claim or the resource that they are about; empty where it is all of the operator."""


def shortened(rule: Mapping[str, Any], by: float) -> dict[str, Any]:
    """The rule with its window, its `for` and its thresholds of seconds divided by `by`."""

    def divided(text: str) -> str:
        of_windows = _DURATION.sub(lambda found: f"{round(int(found[1]) * _UNITS[found[2]] * 1000 / by)}ms", text)
        return _SECONDS.sub(lambda found: f"{int(found[1]) / by:g}", of_windows)

    return {name: divided(value) if name in ("expr", "for") else value for name, value in rule.items()}


def shortened_file(folder: Path, by: Mapping[str, float]) -> Path:
    """A file with all rules of the groups that `by` names an alert of, each divided by its number there."""
    groups = [
        {**group, "rules": [shortened(rule, by[rule["alert"]]) for rule in group["rules"]]}
        for group in GROUPS
        if any(rule["alert"] in by for rule in group["rules"])
    ]
    path = folder / "alerts.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    return path


def fired(server: Prometheus, since: float | None = None) -> Fired:
    """All that have fired so far, or since a time in epoch seconds."""
    seconds = 3600.0 if since is None else max(0.001, time.time() - since)
    happened = server.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{int(seconds * 1000)}ms])')
    about = ("ddpjob", "persistentvolumeclaim", "resource")
    return {
        (labels["alertname"], next((labels[name] for name in about if name in labels), ""))
        for labels in (sample.labels for sample in happened)
    }
