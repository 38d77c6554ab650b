"""Kubernetes objects as they come over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object as plain JSON."""


def parse_time(text: str | None) -> datetime | None:
    """An RFC 3339 time of the Kubernetes API."""
    return datetime.fromisoformat(text) if text else None


def is_bounded(value: Any, levels: int, values: int) -> bool:
    """Whether `value` has at most that many levels of objects and lists, and that many values in all."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [item for item in layer if isinstance(item, dict | list)]
        if not layer:
            return True
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
        values -= len(layer)
        if values < 0:
            return False
    return False
