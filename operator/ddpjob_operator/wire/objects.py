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
