"""Snapshots as the status of a job has them on record, and whether they may be changed now."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.ledger.summary import duration
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.follow.table import printable

_MOST_PODS_NAMED = 3


def on_record(status: DDPJobStatus, now: datetime) -> list[str]:
    """The newest snapshot, and those that were set aside; empty if none is on record."""
    lines, found = [], status.snapshot
    if found is not None:
        ago = duration((now - found.time).total_seconds())
        verified = "verified" if found.verified else "not verified yet"
        lines.append(f"step {found.step:>10}  {found.time:%Y-%m-%d %H:%M:%S} UTC  {verified}, newest, {ago} ago")
    return [*lines, *(f"set aside: {printable(corrupt)}" for corrupt in status.corrupt_snapshots)]


def why_not_now(name: str, status: DDPJobStatus, pods: Iterable[PodView], changed: str) -> str:
    """Why snapshots of the job may not be `changed` now, such as removed; empty if they may."""
    running = [pod.name for pod in pods if not pod.ended]
    if running:
        more = f" and {len(running) - _MOST_PODS_NAMED} more" if len(running) > _MOST_PODS_NAMED else ""
        what = f"its pods {', '.join(running[:_MOST_PODS_NAMED])}{more} use them"
    elif status.phase is None or status.phase.final or status.phase == "Suspended":
        return ""
    else:
        what = f"it is {status.phase}"
    return f"snapshots of {name} cannot be {changed} now: {what}; ddpjob suspend {name} first"
