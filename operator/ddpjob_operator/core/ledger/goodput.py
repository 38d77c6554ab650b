"""Where a job's time goes: a ledger in seconds by cause that always adds up to the time since the job began.

It moves on when the cause changes or when there is news of the training, never with the clock alone, so a job at rest
stays at rest. Time between two entries goes, as far as the trainer has reported, to the phases it spent it in, and the
rest to the cause that held. When an attempt ends, the training that no snapshot has kept becomes recovering. The ratio
is what others call goodput or effective training time (ETTR): kept steps over wall time.

Counted in whole milliseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, Goodput, Phase
from ddpjob_operator.core.failure.detect import last_report
from ddpjob_operator.core.values.changes import with_ledger
from ddpjob_operator.core.values.observed import Observed
from ddpjob_operator.core.values.trainer_report import TrainerReport

CAUSES = (
    "queued",
    "pulling",
    "initializing",
    "rendezvous",
    "first_step",
    "training",
    "validating",
    "saving",
    "stalled",
    "recovering",
    "suspended",
    "unknown",
)

_OF_PHASE = {
    "init": "rendezvous",
    "script": "unknown",
    "rendezvous": "rendezvous",
    "load": "rendezvous",
    "first_step": "first_step",
    "train": "training",
    "validate": "validating",
    "save": "saving",
    "done": "training",
    "waiting": "recovering",
}
"""From the trainer's phases (docs/contracts.md section 4) to ours."""


def with_goodput(before: DDPJobStatus, after: DDPJobStatus, observed: Observed, now: datetime) -> DDPJobStatus:
    """`after` with its ledger brought up to `now`, if anything has happened since the ledger of `before`."""
    if after.start_time is None or before.is_final:
        return after
    ledger = before.goodput or Goodput(counted_until=after.start_time, cause="queued")
    cause = _cause(after, observed)
    over = after.attempt != before.attempt or after.is_final
    if before.goodput is not None and cause == ledger.cause and before.progress == after.progress and not over:
        return after
    report = _report(before, observed)
    stalled = over and after.last_failure != before.last_failure and _reason(after) == "Stalled"
    reported = _reported(report, before, _milliseconds(ledger.counted_until, now))
    milliseconds = _advanced(ledger, reported.new, now, "stalled" if stalled else ledger.cause)
    if over:
        milliseconds, lost = _without_lost(milliseconds, reported.seconds, after, report)
        seconds, recomputed = dict[str, float](), ledger.recomputed_steps + lost
    else:
        seconds, recomputed = reported.seconds, ledger.recomputed_steps
    goodput = Goodput(
        **{name: count / 1000 for name, count in milliseconds.items()},
        ratio=_ratio(milliseconds),
        recomputed_steps=recomputed,
        cause="" if after.is_final else cause,
        counted_until=_later(ledger.counted_until, now),
    )
    return with_ledger(after, goodput, seconds)


def seconds_of(ledger: Goodput) -> dict[str, float]:
    """The ledger's seconds by cause."""
    return {name: getattr(ledger, name) for name in CAUSES}


def _cause(status: DDPJobStatus, observed: Observed) -> str:
    """What the job's time goes into at this moment."""
    pods = [pod for pod in observed.pods if pod.attempt == status.attempt and not pod.deleting]
    match status.phase:
        case Phase.SUSPENDED:
            return "suspended"
        case Phase.RUNNING:
            report = observed.report
            known = report is not None and report.attempt == status.attempt
            return _OF_PHASE.get(report.phase, "rendezvous") if report and known else "rendezvous"
        case Phase.RESTARTING:
            return "queued" if any(not pod.placed for pod in pods) else "recovering"
        case Phase.STARTING:
            placed = sum(pod.placed for pod in pods)
            return "pulling" if placed and placed >= status.nodes.total else "queued"
        case _:
            return "initializing" if observed.initializer is not None else "queued"


def _report(before: DDPJobStatus, observed: Observed) -> TrainerReport | None:
    """What the trainer of the attempt last said, at its end in its termination message."""
    of_attempt = [pod for pod in observed.pods if pod.attempt == before.attempt]
    if (last := last_report(of_attempt)) is not None:
        return last
    report = observed.report
    return report if report is not None and report.attempt == before.attempt else None


def _seconds_reported(report: TrainerReport | None) -> dict[str, float]:
    """Seconds by cause that the trainer reports of this attempt."""
    found: dict[str, float] = {}
    for phase, spent in report.seconds.items() if report else ():
        if (cause := _OF_PHASE.get(phase)) is not None:
            found[cause] = round(found.get(cause, 0.0) + spent, 3)
    return found


@dataclass(frozen=True, slots=True)
class _Reported:
    """Seconds of this attempt that the ledger has taken from the trainer, and the milliseconds that are new."""

    seconds: dict[str, float]
    new: dict[str, int]


def _reported(report: TrainerReport | None, before: DDPJobStatus, left: int) -> _Reported:
    """What the trainer reports beyond what is known, `left` milliseconds at most. What the trainer is ahead of the
    clock is taken the next time.
    """
    seconds, new = dict(before.internal.reported_seconds), {}
    for cause, spent in _seconds_reported(report).items():
        new[cause] = max(0, min(left, round((spent - seconds.get(cause, 0.0)) * 1000)))
        seconds[cause] = round(seconds.get(cause, 0.0) + new[cause] / 1000, 3)
        left -= new[cause]
    return _Reported(seconds, new)


def _advanced(ledger: Goodput, new: Mapping[str, int], now: datetime, rest_to: str) -> dict[str, int]:
    """The ledger in milliseconds, with the time since it was last counted: what the trainer reported, and the rest."""
    counts = {name: round(seconds * 1000) for name, seconds in seconds_of(ledger).items()}
    for cause, milliseconds in new.items():
        counts[cause] += milliseconds
    rest = _milliseconds(ledger.counted_until, now) - sum(new.values())
    counts[rest_to if rest_to in counts else "queued"] += rest
    return counts


def _without_lost(
    counts: dict[str, int], reported: Mapping[str, float], status: DDPJobStatus, report: TrainerReport | None
) -> tuple[dict[str, int], int]:
    """Training of an attempt that is over, less the steps that no snapshot has kept; and how many those are."""
    if status.phase is Phase.SUCCEEDED or status.progress is None or status.progress.step is None:
        return counts, 0
    kept = status.snapshot.step if status.snapshot else 0
    lost = max(0, status.progress.step - kept)
    began = (report.resumed_from_step if report else None) or 0
    trained = status.progress.step - began
    if lost == 0 or trained <= 0:
        return counts, 0
    share = min(1.0, lost / trained)
    moved = min(counts["training"], round(reported.get("training", 0.0) * share * 1000))
    return counts | {"training": counts["training"] - moved, "recovering": counts["recovering"] + moved}, lost


def _ratio(counts: Mapping[str, int]) -> float | None:
    active = sum(counts.values()) - counts["suspended"]
    if active <= 0 or (counts["unknown"] and not counts["training"]):
        return None  # a script whose steps cannot be seen may have trained all the time
    return round(counts["training"] / active, 4)


def _milliseconds(since: datetime | None, now: datetime) -> int:
    return 0 if since is None else max(0, (now - since) // timedelta(milliseconds=1))


def _later(since: datetime | None, now: datetime) -> datetime:
    """`since` moved on by what was counted: a clock that was set back moves nothing."""
    return now if since is None else since + timedelta(milliseconds=_milliseconds(since, now))


def _reason(status: DDPJobStatus) -> str:
    return status.last_failure.reason if status.last_failure else ""
