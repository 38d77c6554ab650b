"""Seconds for which a job held its nodes, as what a write of the status adds to its ledger.

The ledger of a job moves training seconds to `recovering` when a failure loses them. Counters cannot go back: seconds
stay where they were counted first, and those that are lost later are counted once more, as lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpjob_operator.api.status import DDPJobStatus, Goodput
from ddpjob_operator.core.ledger.goodput import ACTIVITIES, seconds_of

HELD = tuple(name for name in ACTIVITIES if name not in ("queued", "initializing", "suspended"))
"""Activities during which the pods of a gang hold their nodes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds by activity, and how many seconds of training were counted before and are lost now."""

    seconds: Mapping[str, float]
    lost: float
    nodes: int
    """Pods that were held for these seconds."""


def usage_between(before: DDPJobStatus, after: DDPJobStatus) -> Usage:
    """What `after` adds to what `before` has on record."""
    then, now = seconds_of(before.goodput or Goodput()), seconds_of(after.goodput or Goodput())
    new = {name: round(now[name] - then[name], 3) for name in HELD}
    lost = max(0.0, -new["training"])
    new["training"] = max(0.0, new["training"])
    new["recovering"] = round(new["recovering"] - lost, 3)
    seconds = {name: spent for name, spent in new.items() if spent > 0}
    return Usage(seconds, lost, before.nodes.total or after.nodes.total)
