"""The columns of `kubectl get`, derived from the rest of a status.

Unknown values are left out, so that a column is empty and never a misleading 0. Nothing here depends on the clock: a
status that does not change needs no write.
"""

from __future__ import annotations

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase, Progress, Summary
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.changes import recorded

_EXPLAINS: dict[Phase, tuple[tuple[str, str], ...]] = {
    Phase.PENDING: ((cond.DEGRADED, "True"), (cond.INITIALIZED, "False"), (cond.SCHEDULED, "False")),
    Phase.STARTING: ((cond.DEGRADED, "True"), (cond.SCHEDULED, "False")),
    Phase.RUNNING: ((cond.DEGRADED, "True"), (cond.SNAPSHOTS_FAILING, "True"), (cond.LOSS_NOT_FINITE, "True")),
    Phase.RESTARTING: ((cond.DEGRADED, "True"), (cond.RESTARTING, "True")),
    Phase.SUSPENDED: ((cond.SUSPENDED, "True"),),
    Phase.SUCCEEDED: ((cond.COMPLETE, "True"),),
    Phase.FAILED: ((cond.FAILED, "True"),),
}
"""Conditions whose reason explains a phase, the most specific first."""


def with_summary(status: DDPJobStatus) -> DDPJobStatus:
    """`status` with its summary."""
    summary = Summary(
        nodes=_nodes(status.nodes),
        progress=_steps(status.progress),
        eta=_eta(status.progress) if status.phase is Phase.RUNNING else None,
        reason=reason_of(status),
    )
    return recorded(status, summary=summary if summary != Summary() else None)


def duration(seconds: float) -> str:
    """A duration as kubectl prints it in the column AGE: `42s`, `3m20s`, `2h5m`, `3d4h`."""
    total = max(0, int(seconds))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if total < 120:
        return f"{total}s"
    if minutes < 10:
        return f"{minutes}m{_rest(total % 60, 's')}"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{_rest(minutes % 60, 'm')}"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{_rest(hours % 24, 'h')}"
    return f"{days}d"


def _rest(count: int, unit: str) -> str:
    return f"{count}{unit}" if count else ""


def _nodes(nodes: NodeCount) -> str | None:
    return f"{nodes.ready}/{nodes.total}" if nodes.total else None


def _steps(progress: Progress | None) -> str | None:
    if progress is None or progress.step is None:
        return None
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def _eta(progress: Progress | None) -> str | None:
    if progress is None or progress.remaining_seconds is None:
        return None
    return duration(progress.remaining_seconds)


def reason_of(status: DDPJobStatus) -> str | None:
    """The reason of the condition that explains the phase."""
    for type_, value in _EXPLAINS[status.phase] if status.phase else ():
        condition = cond.find(status.conditions, type_)
        if condition is not None and condition.status == value and condition.reason:
            return condition.reason
    return None
