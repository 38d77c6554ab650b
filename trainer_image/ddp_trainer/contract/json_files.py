"""Small JSON files that one process writes while another reads: whole or not there, never half."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` in one rename, making its directory first if need be.

    NaN and infinities become null: strict JSON, which /status must be, has no word for them.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_text(text)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None where there is none or it is no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
