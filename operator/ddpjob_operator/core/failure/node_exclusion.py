"""Which nodes a job keeps away from: those that a restart rule names, and those that failed it again and again.

Only failures that may be a node's doing are held against it (`diagnosis.NODE_SUSPECT`): an exception of the script's
says nothing about where it ran. A node is ruled out once it has failed the job `restart.excludeNodeAfter` times and the
job is known to have run on another one that is not ruled out; as long as it may be the only one there is, other
nodes are merely preferred. What a rule excludes is ruled out at once.
"""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.policies import Restart
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.values.changes import recorded, with_rule_excluded_nodes
from ddpjob_operator.core.values.look import Look

NODES_KEPT = 64
"""Nodes that a status remembers; of more, those that failed the job least are forgotten."""


FORGIVEN_SECONDS = 86400.0


def blame_node(look: Look, failure: Failure, *, exclude: bool) -> DDPJobStatus:
    """The status after `failure`; `exclude` is what a rule asks for."""
    policy, node = look.job.spec.restart, failure.node_name
    status = forgiven(policy, look.status, look.now)
    if node is None or not (exclude or diagnose(failure).node_suspect):
        return status
    failures = status.node_failures | {node: status.node_failures.get(node, 0) + 1}
    excluded = status.excluded_nodes
    if exclude:
        excluded = _with_newest(excluded, node)
        by_rule = _with_newest(status.internal.rule_excluded_nodes, node)
        status = with_rule_excluded_nodes(status, by_rule[-NODES_KEPT:])
    known = {*failures, *(pod.node_name for pod in look.observed.pods if pod.node_name is not None)}
    for name in sorted(_offenders(policy, failures), key=lambda name: (-failures[name], name)):
        if name not in excluded and known - {name, *excluded}:
            excluded = (*excluded, name)
    kept = _worst(failures, node)
    times = {name: time for name, time in status.node_failure_times.items() if name in kept} | {node: look.now}
    return recorded(status, node_failures=kept, node_failure_times=times, excluded_nodes=excluded[-NODES_KEPT:])


def dated(policy: Restart, status: DDPJobStatus, now: datetime) -> DDPJobStatus:
    """`status` with a time for each node's failures: `now` for those that version 0.1.0 has recorded, without one. What
    that has excluded before the limit was reached, a rule has.
    """
    undated = sorted(status.node_failures.keys() - status.node_failure_times.keys())
    if not undated:
        return status
    counted = _offenders(policy, status.node_failures)
    by_rule = [name for name in status.excluded_nodes if name in undated and name not in counted]
    if by_rule:
        status = with_rule_excluded_nodes(status, (*status.internal.rule_excluded_nodes, *by_rule)[-NODES_KEPT:])
    return recorded(status, node_failure_times=dict.fromkeys(undated, now) | status.node_failure_times)


def forgiven(policy: Restart, status: DDPJobStatus, now: datetime) -> DDPJobStatus:
    """`status` without the nodes that have not failed the job for a day: faults are mended, and a month of them would
    rule out every node. What a rule has excluded stays excluded.
    """
    status = dated(policy, status, now)
    old = {name for name, time in status.node_failure_times.items() if (now - time).total_seconds() > FORGIVEN_SECONDS}
    if not old:
        return status
    free = old.difference(status.internal.rule_excluded_nodes)
    return recorded(
        status,
        node_failures={name: count for name, count in status.node_failures.items() if name not in old},
        node_failure_times={name: time for name, time in status.node_failure_times.items() if name not in old},
        excluded_nodes=tuple(name for name in status.excluded_nodes if name not in free),
    )


def until_forgiven(status: DDPJobStatus, now: datetime) -> float | None:
    """Seconds until the first excluded node is used again; None if none will be."""
    counted = {*status.excluded_nodes}.difference(status.internal.rule_excluded_nodes)
    times = [status.node_failure_times[name] for name in counted if name in status.node_failure_times]
    return min((FORGIVEN_SECONDS + 1 - (now - time).total_seconds() for time in times), default=None)


def unwelcome(policy: Restart, status: DDPJobStatus) -> tuple[str, ...]:
    """Nodes that failed the job too often, and are the only ones it knows: others are preferred to them."""
    return tuple(sorted(_offenders(policy, status.node_failures) - set(status.excluded_nodes)))


def barred(status: DDPJobStatus) -> tuple[str, ...]:
    """The nodes on which no pod of the job may be. None where pods find no node while they exclude some by name."""
    return () if status.internal.node_names_refused else status.excluded_nodes


def newly_excluded(before: DDPJobStatus, after: DDPJobStatus) -> str:
    """For people, as a clause: which nodes have just been excluded; empty if none."""
    new = [
        f"{name}, which failed this job {_times(after.node_failures.get(name, 1))}"
        for name in after.excluded_nodes
        if name not in before.excluded_nodes
    ]
    if after.internal.node_names_refused:
        return f"new pods prefer other nodes to {'; to '.join(new)}" if new else ""
    return f"new pods keep away from {'; from '.join(new)}" if new else ""


def kept_away_from(status: DDPJobStatus) -> str:
    """For people who wonder why a pod finds no node; empty if no node is excluded."""
    names = ", ".join(barred(status))
    if not names:
        return ""
    return f"it keeps away from {names} (status.excludedNodes), which failed this job before"


def _offenders(policy: Restart, failures: dict[str, int]) -> set[str]:
    limit = policy.exclude_node_after
    return {name for name, count in failures.items() if limit and count >= limit}


def _with_newest(names: tuple[str, ...], newest: str) -> tuple[str, ...]:
    return (*(name for name in names if name != newest), newest)


def _worst(failures: dict[str, int], newest: str) -> dict[str, int]:
    if len(failures) <= NODES_KEPT:
        return failures
    kept = sorted(failures, key=lambda name: (name == newest, failures[name]))[-NODES_KEPT:]
    return {name: count for name, count in failures.items() if name in kept}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
