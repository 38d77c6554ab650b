"""What torch.compile leaves alone of this package, as it does torch's own Python code."""

from __future__ import annotations

import functools
import sys
from typing import Final

TRACE_RULES: Final = "torch._dynamo.trace_rules"
"""The module of torch that has the rules. What is here may be called once it has been imported."""


@functools.cache  # torch compiles the expression of all its rules anew, also for a module that it knows
def keep_out_of_graphs(name: str) -> None:
    """Let it run what this module or package of ours has in Python."""
    sys.modules[TRACE_RULES].add(name)
