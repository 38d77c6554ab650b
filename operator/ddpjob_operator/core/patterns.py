"""Regular expressions over what containers say: linear in the text (RE2), whatever either of them is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

from ddpjob_operator.api.rules import PATTERN_OPTIONS


def found(pattern: str, text: str) -> bool:
    """Whether `pattern` (RE2 syntax, known to compile) matches somewhere in `text`."""
    return _compiled(pattern).search(text.encode("utf-8", "replace").decode()) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    return re2.compile(pattern, PATTERN_OPTIONS)
