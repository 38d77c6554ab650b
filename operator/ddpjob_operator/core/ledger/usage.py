"""Seconds for which a job held its nodes: as they pass, and in the end.

The ledger of a job moves training seconds to `recovering` when a failure loses them. Counters cannot go back. What
passes stays where it was counted first, and what is lost later is counted once more, as lost (`usage_between`). The
status keeps the account of the whole job, in which lost seconds are moved as in the ledger (`with_usage`). It is
counted when the job has ended: then no second can move any more, and the outcome is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Goodput
from ddpjob_operator.core.ledger.goodput import ACTIVITIES, seconds_of
from ddpjob_operator.core.values.changes import with_held, with_ledger

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
    new = _new(before, after)
    lost = max(0.0, -new["training"])
    new["training"] = max(0.0, new["training"])
    new["recovering"] = round(new["recovering"] - lost, 3)
    seconds = {name: spent for name, spent in new.items() if spent > 0}
    return Usage(seconds, lost, _nodes(before, after))


def with_usage(before: DDPJobStatus, after: DDPJobStatus, gpus_per_node: int) -> DDPJobStatus:
    """`after` with the account of nodes and GPUs that `before` has, and what the ledger of `after` adds to it."""
    if after.goodput == before.goodput:
        return after  # a status that an operator without accounts has written is not written for the sake of one
    nodes, new = _nodes(before, after), _new(before, after)
    account = before.internal
    return with_held(
        after,
        _added(account.node_seconds or _estimated(before, nodes), new, nodes),
        _added(account.gpu_seconds or _estimated(before, nodes * gpus_per_node), new, nodes * gpus_per_node),
    )


def until_deleted(status: DDPJobStatus, now: datetime) -> DDPJobStatus:
    """The status of a job that was deleted before its end, with its last activity until `now`."""
    ledger = status.goodput
    if ledger is None or ledger.last_update_time is None or ledger.activity not in HELD:
        return status
    passed = max(0.0, (now - ledger.last_update_time).total_seconds())
    spent = seconds_of(ledger)
    spent[ledger.activity] = round(spent[ledger.activity] + passed, 3)
    return with_ledger(status, Goodput(**spent), status.internal.reported_seconds, None)


def _new(before: DDPJobStatus, after: DDPJobStatus) -> dict[str, float]:
    then, now = seconds_of(before.goodput or Goodput()), seconds_of(after.goodput or Goodput())
    return {name: round(now[name] - then[name], 3) for name in HELD}


def _nodes(before: DDPJobStatus, after: DDPJobStatus) -> int:
    return before.nodes.total or after.nodes.total


def _estimated(status: DDPJobStatus, number: int) -> dict[str, float]:
    """The account of a job whose status an operator without accounts has written, as if its size had not changed."""
    spent = seconds_of(status.goodput or Goodput())
    return {name: spent[name] * number for name in HELD}


def _added(account: Mapping[str, float], new: Mapping[str, float], number: int) -> dict[str, float]:
    """Lost training may be more than the account has of it, if the attempt that trained was smaller."""
    held = {name: account.get(name, 0.0) + new[name] * number for name in HELD}
    excess = min(0.0, held["training"])
    held |= {"training": held["training"] - excess, "recovering": held["recovering"] + excess}
    return {name: round(spent, 3) for name, spent in held.items() if round(spent, 3) > 0}
