"""How often to save: often enough to lose little in a failure, seldom enough not to cost more than it saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_NODE_MTTF_SECONDS = 24 * 3600.0
"""What is assumed of a node before it has shown anything else: one failure a day."""
MAX_OVERHEAD = 0.035
"""Share of time that saving may stop training (CheckFreq, FAST '21, reports 3.5 % as the price users accept)."""
SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The chosen interval and what it was chosen from; all in seconds."""

    seconds: float
    mttf_seconds: float
    stall_seconds: float
    save_seconds: float
    failures: int
    bound: str | None
    """Which limit decided instead of Young's formula: `overhead`, `save`, `shortest`, `longest`, or None."""


def choose(
    *, stall_seconds: float, save_seconds: float, nodes: int, observed_seconds: float, failures: int
) -> Interval:
    """Young's interval, T = sqrt(2 · MTTF · stall) (CACM 17(9), 1974), within bounds.

    `stall_seconds` is what one save stops training for, `save_seconds` how long it then takes in the background: a
    new one cannot start earlier. The MTTF of the job is its nodes' divided by their number, and a node's is
    estimated from `failures` seen in `observed_seconds` of the job's life together with the prior, which counts as
    one failure in 24 hours of one node: (24 h + nodes · observed) / (1 + failures).
    """
    node_mttf = (PRIOR_NODE_MTTF_SECONDS + nodes * observed_seconds) / (1 + failures)
    mttf = node_mttf / nodes
    young = math.sqrt(2 * mttf * stall_seconds)
    floors = {"overhead": stall_seconds / MAX_OVERHEAD, "save": save_seconds, "shortest": SHORTEST_SECONDS}
    floor = max(floors, key=lambda name: floors[name])
    seconds, bound = young, None
    if seconds > LONGEST_SECONDS:
        seconds, bound = LONGEST_SECONDS, "longest"
    if seconds < floors[floor]:
        seconds, bound = floors[floor], floor
    return Interval(seconds, mttf, stall_seconds, save_seconds, failures, bound)
