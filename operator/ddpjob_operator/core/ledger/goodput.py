"""Where a job's time goes: a ledger in seconds by activity that always adds up to the time since the job began.

It is updated when the activity or the progress changes, not by the clock alone, so that an idle job needs no status
write; but each minute where a script shows neither, since what its nodes are held for is counted as it passes. The time
since the last update goes to the phases that the trainer has reported, and the rest to the last activity. What an
attempt has lost is known when the next one has resumed, since ranks that leave may save a snapshot after the failure
was noticed: then training seconds of the steps that are made again become recovering. The ratio is the goodput, also
called effective training time ratio (ETTR): seconds of kept steps divided by wall-clock seconds.

Counted in whole milliseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, Goodput, Phase, UnresolvedSteps
from ddpjob_operator.core.failure.detect import has_succeeded, last_report, last_reports
from ddpjob_operator.core.values.changes import with_ledger
from ddpjob_operator.core.values.observed import Observed
from ddpjob_operator.core.values.trainer_report import LARGEST_INTEGER, TrainerReport

ACTIVITIES = (
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
    "requirements": "rendezvous",  # initializers hold no nodes, and these pods do
    "init": "rendezvous",
    "script": "unknown",
    "rendezvous": "rendezvous",
    "load": "rendezvous",
    "first_step": "first_step",
    "train": "training",
    "validate": "validating",
    "save": "saving",
    "done": "unknown",  # the script has returned, and may still upload what it made
    "waiting": "recovering",
}
"""From the trainer's phases (docs/contracts.md section 4) to ours."""

_OLDEST_REPORT = timedelta(seconds=5)

_LONGEST_UNKNOWN = timedelta(minutes=1)
"""Until the ledger of a script of which nothing else is heard is brought up to date."""

AT_WORK = ("first_step", "training", "validating", "saving")
"""Activities of which the trainer reports each second."""


def with_goodput(before: DDPJobStatus, after: DDPJobStatus, observed: Observed, now: datetime) -> DDPJobStatus:
    """`after` with its ledger brought up to `now`, if anything has happened since the ledger of `before`."""
    if after.start_time is None or before.is_final:
        return after
    ledger = before.goodput or Goodput(last_update_time=after.start_time, activity="queued")
    activity = _activity(after, observed, ledger.activity if before.internal.reported_seconds else "rendezvous")
    over = after.attempt != before.attempt or after.is_final
    unresolved = before.internal.unresolved_steps
    resumed = None if unresolved is None else _resumed_from(_report(before, observed), before)
    unchanged = activity == ledger.activity and before.progress == after.progress and resumed is None
    unchanged = unchanged and not (activity == "unknown" and _since(ledger, now) >= _LONGEST_UNKNOWN)
    if before.goodput is not None and unchanged and not over:
        return after
    report = _report(before, observed)
    spent = _seconds_reported(report, timedelta(0) if over else _age(report, now))
    reported = _reported(spent, before, _milliseconds(ledger.last_update_time, now))
    milliseconds = _advanced(ledger, reported.new, now, _of_rest(ledger.activity, before, after, observed))
    seconds, recomputed = reported.seconds, ledger.recomputed_steps
    if unresolved is not None and resumed is not None:
        milliseconds, lost = _without_lost(milliseconds, unresolved, resumed)
        recomputed, unresolved = recomputed + lost, None
    if over:
        seconds, unresolved = {}, _trained(before, reported.seconds, report, observed) or unresolved
    if over and after.is_final:
        if unresolved is not None and after.phase is not Phase.SUCCEEDED:
            milliseconds, lost = _without_lost(milliseconds, unresolved, _kept(after))
            recomputed += lost
        unresolved = None
    goodput = Goodput(
        **{name: count / 1000 for name, count in milliseconds.items()},
        ratio=_ratio(milliseconds),
        recomputed_steps=min(LARGEST_INTEGER, recomputed),
        activity="" if after.is_final else activity,
        last_update_time=_later(ledger.last_update_time, now),
    )
    return with_ledger(after, goodput, seconds, unresolved)


def seconds_of(ledger: Goodput) -> dict[str, float]:
    """The ledger's seconds by activity."""
    return {name: getattr(ledger, name) for name in ACTIVITIES}


def _activity(status: DDPJobStatus, observed: Observed, unheard: str) -> str:
    """What the job's time goes into at this moment; `unheard` where a job runs whose trainer does not answer."""
    pods = [pod for pod in observed.pods if pod.attempt == status.attempt and not pod.deleting]
    match status.phase:
        case Phase.SUSPENDED:
            return "suspended"
        case Phase.RUNNING:
            report = observed.report
            known = report is not None and report.attempt == status.attempt
            return _OF_PHASE.get(report.phase, "rendezvous") if report and known else unheard
        case Phase.RESTARTING:
            is_without_nodes = not observed.pods  # a backoff goes on when the last pod of the attempt before is gone
            return "queued" if is_without_nodes or any(not pod.placed for pod in pods) else "recovering"
        case Phase.STARTING:
            placed = sum(pod.placed for pod in pods)
            return "pulling" if placed and placed >= status.nodes.total else "queued"
        case _:
            return "initializing" if observed.initializer is not None else "queued"


def _report(before: DDPJobStatus, observed: Observed) -> TrainerReport | None:
    """What the trainer of the attempt last said, at its end in its termination message."""
    if (last := _final_report(before, observed)) is not None:
        return last
    report = observed.report
    return report if report is not None and report.attempt == before.attempt else None


def _final_report(before: DDPJobStatus, observed: Observed) -> TrainerReport | None:
    return last_report([pod for pod in observed.pods if pod.attempt == before.attempt])


def _age(report: TrainerReport | None, now: datetime) -> timedelta:
    """How long ago the trainer made its report: it is asked every two seconds, and clocks of nodes differ."""
    if report is None or report.time is None:
        return timedelta(0)
    return min(_OLDEST_REPORT, max(timedelta(0), timedelta(seconds=now.timestamp() - report.time)))


def _seconds_reported(report: TrainerReport | None, age: timedelta) -> dict[str, float]:
    """Seconds by activity that the trainer reports of this attempt; `age` later it is in the same phase still."""
    found: dict[str, float] = {}
    for phase, spent in report.seconds.items() if report else ():
        if (activity := _OF_PHASE.get(phase)) is not None:
            since = age.total_seconds() if report is not None and phase == report.phase else 0.0
            found[activity] = round(found.get(activity, 0.0) + spent + since, 3)
    return found


@dataclass(frozen=True, slots=True)
class _Reported:
    """Seconds of this attempt that the ledger has taken from the trainer, and the milliseconds that are new."""

    seconds: dict[str, float]
    new: dict[str, int]


def _reported(spent: Mapping[str, float], before: DDPJobStatus, left: int) -> _Reported:
    """What of `spent` goes beyond what is known, `left` milliseconds at most. What the trainer is ahead of the
    clock is taken the next time.

    It is ahead by the step that was under way when a report was read, whose time has gone to the activity before. So
    steps come first: what is too little then is the time after the last one.
    """
    seconds, new = dict(before.internal.reported_seconds), {}
    for activity in sorted(spent, key=lambda activity: activity not in AT_WORK):
        new[activity] = max(0, min(left, round((spent[activity] - seconds.get(activity, 0.0)) * 1000)))
        seconds[activity] = round(seconds.get(activity, 0.0) + new[activity] / 1000, 3)
        left -= new[activity]
    return _Reported(seconds, new)


def _advanced(ledger: Goodput, new: Mapping[str, int], now: datetime, rest_to: str) -> dict[str, int]:
    """The ledger in milliseconds, with the time since it was last counted: what the trainer reported, and the rest."""
    counts = {name: round(seconds * 1000) for name, seconds in seconds_of(ledger).items()}
    for activity, milliseconds in new.items():
        counts[activity] += milliseconds
    rest = _milliseconds(ledger.last_update_time, now) - sum(new.values())
    counts[rest_to if rest_to in counts else "queued"] += rest
    return counts


def _of_rest(last: str, before: DDPJobStatus, after: DDPJobStatus, observed: Observed) -> str:
    """What the time goes to that the trainer does not report: as a rule `last`, the activity until now. An attempt that
    has ended did not go on with it until its end was seen, and neither did one whose node rank 0 is done.
    """
    goes_on = after.attempt == before.attempt and not after.is_final
    if not goes_on and after.last_failure != before.last_failure and _reason(after) == "Stalled":
        return "stalled"
    if last not in AT_WORK or _final_report(before, observed) is None:
        return last
    if goes_on:
        return "unknown" if _is_done(before, observed) else last
    return "unknown" if after.phase is Phase.SUCCEEDED else "recovering"


def _is_done(before: DDPJobStatus, observed: Observed) -> bool:
    """Whether the pod of node rank 0 has succeeded. Another one may have its place after a failure."""
    pods = (pod for pod in observed.pods if pod.attempt == before.attempt and pod.node_rank == 0)
    return any(has_succeeded(pod) for pod in pods)


def _trained(
    before: DDPJobStatus, reported: Mapping[str, float], report: TrainerReport | None, observed: Observed
) -> UnresolvedSteps | None:
    """What the attempt that ends has trained; None for nothing, or nothing that is known. A pod that failed knows its
    last step, while the report of one that still runs is seconds old.
    """
    training = reported.get("training", 0.0)
    said = [ended for _, ended in last_reports(pod for pod in observed.pods if pod.attempt == before.attempt)]
    known = [report, *said] if report is not None else said
    last = max((one.step for one in known if one.step is not None), default=None)
    if last is None and training > 0 and before.progress is not None:  # its pods are gone, and were heard before
        last = before.progress.step
    first = next((one.resumed_from_step for one in known if one.resumed_from_step is not None), 0)
    return None if last is None or last <= first else UnresolvedSteps(first=first, last=last, training=training)


def _resumed_from(report: TrainerReport | None, status: DDPJobStatus) -> int | None:
    """The step that this attempt has resumed from; None while it has not begun. A script that does not say resumes
    from the newest snapshot, or begins anew.
    """
    if report is None or report.step is None:
        return None
    return _kept(status) if report.resumed_from_step is None else report.resumed_from_step


def _kept(status: DDPJobStatus) -> int:
    return status.snapshot.step if status.snapshot else 0


def _without_lost(counts: dict[str, int], trained: UnresolvedSteps, resumed: int) -> tuple[dict[str, int], int]:
    """The ledger without the training of steps that are made again; and how many those are."""
    lost = max(0, trained.last - resumed)
    share = min(1.0, lost / (trained.last - trained.first))
    moved = min(counts["training"], round(trained.training * share * 1000))
    return counts | {"training": counts["training"] - moved, "recovering": counts["recovering"] + moved}, lost


def _ratio(counts: Mapping[str, int]) -> float | None:
    active = sum(counts.values()) - counts["suspended"]
    if active <= 0 or (counts["unknown"] and not counts["training"]):
        return None  # a script whose steps cannot be seen may have trained all the time
    return round(counts["training"] / active, 4)


def _milliseconds(since: datetime | None, now: datetime) -> int:
    return 0 if since is None else max(0, (now - since) // timedelta(milliseconds=1))


def _since(ledger: Goodput, now: datetime) -> timedelta:
    return timedelta(milliseconds=_milliseconds(ledger.last_update_time, now))


def _later(since: datetime | None, now: datetime) -> datetime:
    """`since` moved on by what was counted: a clock that was set back moves nothing."""
    return now if since is None else since + timedelta(milliseconds=_milliseconds(since, now))


def _reason(status: DDPJobStatus) -> str:
    return status.last_failure.reason if status.last_failure else ""
