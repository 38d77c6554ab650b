"""`$(NAME)` in commands, arguments and environment values, as Kubernetes expands it.

The rules are those of k8s.io/kubernetes/third_party/forked/golang/expansion: `$(NAME)` becomes the variable's
value, stays as it is when there is no such variable, and `$$` is one `$`, so that `$$(NAME)` reads `$(NAME)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its references to `variables` replaced, once: a value that contains `$(` is not expanded again."""

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replacement, text)
