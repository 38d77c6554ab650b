"""Paths below /mnt/shared in the text of a script: unlike arguments and variables of the job, they are not replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH

_DEFAULTS = frozenset({"add_argument", "get", "getenv", "setdefault"})
"""Calls whose arguments are what an option or a variable is without a value."""


def written_in(script: Path, mount: Path, shared: Path) -> tuple[int, str] | None:
    """Line and path of the first that is not below `shared` on this machine, where `mount` is the volume in a pod.

    None for a script that has none, or that cannot be read as Python: that is found out when it runs.
    """
    if mount.exists() and mount.samefile(shared):
        return None
    try:
        return min(_below_the_volume(ast.parse(script.read_bytes())), default=None)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deep
        return None


def _below_the_volume(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value == SHARED_PATH or node.value.startswith(f"{SHARED_PATH}/"):
            yield node.lineno, node.value
        return
    if isinstance(node, ast.Call) and _name(node.func) in _DEFAULTS:
        return
    for child in ast.iter_child_nodes(node):
        yield from _below_the_volume(child)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
