"""Which tests of the cluster two workers may run at the same time, and in which order one worker runs them."""

from __future__ import annotations

from typing import Final

BESIDE: Final = frozenset(
    f"test_{name}.py"
    for name in ("causes", "chaos_jobs", "dashboard", "history", "initializers", "live_recovery", "shared_claim",
                 "submit", "watch")
)  # fmt: skip
"""A second worker has these files. They leave nodes and operator alone, and need no unbroken run."""

FIRST: Final = "test_training.py"
"""Looks at the pods of a finished job, which are evicted if a node that a later test takes down is away for long."""

ALONE: Final = frozenset({"test_elastic.py", "test_operator_dies.py", "test_verbs.py"})
"""They take a node or the operator away from all jobs."""

LAST: Final = "test_permissions.py"
"""Looks back at all that the operator did for the tests before it."""


def place(file: str) -> tuple[bool, bool, bool]:
    """What the tests of a worker are sorted by."""
    return file != FIRST, file in ALONE, file == LAST
