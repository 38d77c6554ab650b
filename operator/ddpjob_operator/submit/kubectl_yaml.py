"""YAML as kubectl reads it (go-yaml 2, resolve.go), which has other numbers and truth values than PyYAML.

`1e-3` is a number there, and a text to PyYAML; `12:30` is a text there, and a number to PyYAML; `y` is true there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

Forms = dict[str | None, list[tuple[str, re.Pattern[str]]]]
"""Of scalars without quotes, by their first character: tags and what they look like, the first that matches wins."""

_TAG = "tag:yaml.org,2002:"
_OTHERS = frozenset(f"{_TAG}{name}" for name in ("bool", "int", "float", "timestamp", "value"))
"""What PyYAML and kubectl disagree about. A date is a text for kubectl, as JSON has none."""
_WORDS = ("y", "n", "yes", "no", "true", "false", "on", "off")
_OURS = (
    (f"{_TAG}bool", "|".join(f"{word}|{word.title()}|{word.upper()}" for word in _WORDS), "yYnNtTfFoO"),
    (f"{_TAG}int", r"[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)", "-+0123456789"),
    (
        f"{_TAG}float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


def _with_ours(forms: Mapping[Any, Iterable[tuple[str, Any]]], without: frozenset[str] = frozenset()) -> Forms:
    found: Forms = {first: [pair for pair in pairs if pair[0] not in without] for first, pairs in forms.items()}
    for tag, form, firsts in _OURS:
        for first in firsts:
            found.setdefault(first, []).append((tag, re.compile(f"^({form})$")))
    return found


READ: Forms = _with_ours(yaml.SafeLoader.yaml_implicit_resolvers, _OTHERS)
"""For a loader."""
TRUTH: dict[str, bool] = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
"""The truth values of a loader, in lower case."""
_Dumper: Any = type(
    "_Dumper", (yaml.SafeDumper,), {"yaml_implicit_resolvers": _with_ours(yaml.SafeDumper.yaml_implicit_resolvers)}
)
"""Puts a text in quotes that either of the two would read as something else."""


def dump(content: Any) -> str:
    """YAML that kubectl and PyYAML read alike."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
