"""Counters that only grow while the pod runs, though each rank process, in each attempt, starts its own at zero."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any


class CounterLedger:
    """The counters of rank 0 for as long as the pod has node rank 0, those of earlier processes included."""

    def __init__(self) -> None:
        self._process: tuple[int, int] | None = None
        self._before: dict[str, Any] = {}
        self._current: dict[str, Any] = {}
        self._lock = threading.Lock()

    def totals(self, attempt: int, heartbeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What has been counted, with the newest heartbeats of `attempt` among it, of which rank 0's may be missing.

        Call it with the last ones of an attempt as well: what was counted since the last scrape is lost otherwise.
        """
        with self._lock:
            first = next((heartbeat for heartbeat in heartbeats if heartbeat["rank"] == 0), None)
            if first is not None and (self._process is None or attempt >= self._process[0]):
                process = (attempt, first["pid"])  # a pid may be used again in a later attempt
                if process != self._process:
                    self._before = _add(self._before, self._current)
                    self._process = process
                self._current = first["counters"]
            return _add(self._before, self._current)


def _add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Sum two sets of counters, key by key and bucket by bucket."""
    result = dict(left)
    for key, value in right.items():
        present = result.get(key)
        if present is None:
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _add(present, value)
        elif isinstance(value, list):
            result[key] = [a + b for a, b in zip(present, value, strict=True)]
        else:
            result[key] = present + value
    return result
