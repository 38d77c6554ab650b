"""What one pod reports: `/status` of docs/contracts.md section 4, from the heartbeats of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.heartbeat import phase_seconds
from ddp_trainer.launch.status.host import Throttling

RankHeartbeat = Mapping[str, Any]

_PROGRESS = ("epoch", "step", "totalSteps", "samples", "loss", "samplesPerSecond")
_REPORTED = (*_PROGRESS, "nonFiniteLoss", "snapshot", "resumedFromStep", "metrics")
_OF_SNAPSHOTS = ("snapshotInterval", "snapshotProblem", "snapshotsSetAside")


@dataclass(frozen=True, slots=True)
class PodState:
    """What is known at one moment: monotonic and wall clock in seconds, registrations and heartbeats by rank."""

    now: float
    wall: float
    ranks: Sequence[Mapping[str, Any]]
    heartbeats: Sequence[RankHeartbeat]
    idle: str | None = None
    """`spare`, `waiting` or `requirements` where no rank runs: the pod has no node rank, its attempt is over, or what
    the code requires is not installed yet."""

    ended: Mapping[str, Any] | None = None
    """The termination message of the attempt that is over."""

    throttling: Throttling | None = None
    """What the CPU limit has cost lately; None where there is none."""


def progress(heartbeats: Sequence[RankHeartbeat]) -> dict[str, Any]:
    """How far this pod is: the lowest rank's view, its newest snapshot by any rank. Unknown fields are None."""
    first: RankHeartbeat = heartbeats[0] if heartbeats else {}
    report = {name: first.get(name) for name in _REPORTED}
    snapshots = [heartbeat["snapshot"] for heartbeat in heartbeats if heartbeat.get("snapshot")]
    report["snapshot"] = max(snapshots, key=lambda snapshot: snapshot["step"], default=None)
    report["nonFiniteLoss"] = next((found for each in heartbeats if (found := each.get("nonFiniteLoss"))), None)
    # a value that only rank 0 measures is still reported where rank 0 is not the first here
    report["metrics"] = {
        name: value for heartbeat in reversed(heartbeats) for name, value in heartbeat.get("metrics", {}).items()
    }
    return report


def ranks_that_train(pod: PodEnvironment, pod_state: PodState) -> int | None:
    """How many ranks are in the process group: with live recovery they may be fewer than the attempt began with. None
    while no rank of this pod runs.
    """
    if pod_state.idle or not pod_state.ranks or not pod_state.heartbeats:
        return None
    live = pod_state.heartbeats[0].get("live")
    ranks: int = live["ranks"] if live else pod.world_size
    return ranks


def _live(heartbeat: RankHeartbeat | None) -> dict[str, Any] | None:
    if heartbeat is None or not (live := heartbeat.get("live")):
        return None
    counters = heartbeat["counters"]
    recoveries = {kind: sum(found["counts"]) for kind, found in counters["recoverySeconds"].items()}
    return {**live, "recoveries": recoveries, "droppedSteps": counters["droppedSteps"]}


def status(pod: PodEnvironment, start_time: float, pod_state: PodState) -> dict[str, Any]:
    """The JSON of `/status`. `start_time` is when this attempt, or the wait for the next, began, in epoch seconds."""
    first: RankHeartbeat | None = pod_state.heartbeats[0] if pod_state.heartbeats else None
    phase = pod_state.idle or (first["phase"] if first else "init" if pod_state.ranks else "rendezvous")
    began = start_time - pod_state.wall if first is None or pod_state.idle else first["phaseTime"] - pod_state.now
    known = progress(pod_state.heartbeats)
    heartbeats = {heartbeat["rank"]: heartbeat for heartbeat in pod_state.heartbeats}
    return {
        "version": 1,
        "job": pod.job,
        "uid": pod.uid,
        "attempt": pod.attempt,
        "nodeRank": pod.node_rank,
        "worldSize": pod.world_size,
        "phase": phase,
        "phaseSeconds": round(-began, 3),
        "seconds": phase_seconds(first, pod_state.now),
        "time": pod_state.wall,
        "startTime": start_time,
        **{name: known[name] for name in _PROGRESS},
        "etaSeconds": _eta(first),
        "nonFiniteLoss": known["nonFiniteLoss"],
        "snapshot": known["snapshot"],
        # of rank 0, which writes them; on other nodes nothing is known
        **{name: first.get(name) if first else None for name in _OF_SNAPSHOTS},
        "stopSeconds": _stop(first),
        "shutdownSeconds": pod.shutdown_seconds,
        "resumedFromStep": known["resumedFromStep"],
        "metrics": known["metrics"],
        "throttling": _throttling(pod_state.throttling),
        "live": _live(first),
        "ended": pod_state.ended,
        "ranks": [_rank(entry, heartbeats.get(entry["rank"]), pod_state.now) for entry in pod_state.ranks],
    }


def _rank(entry: Mapping[str, Any], heartbeat: RankHeartbeat | None, now: float) -> dict[str, Any]:
    return {
        "rank": entry["rank"],
        "localRank": entry["localRank"],
        "phase": heartbeat["phase"] if heartbeat else None,
        "step": heartbeat["step"] if heartbeat else None,
        "ageSeconds": round(max(0.0, now - heartbeat["time"]), 3) if heartbeat else None,
        "stepSeconds": heartbeat.get("stepSecondsMedian") if heartbeat else None,
        "dataSeconds": heartbeat.get("dataSecondsMedian") if heartbeat else None,
        "passesSeconds": heartbeat.get("passesSecondsMedian") if heartbeat else None,
        "pid": entry["pid"],
    }


def _throttling(found: Throttling | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "seconds": round(found.seconds, 3),
        "periods": found.periods,
        "throttledPeriods": found.throttled_periods,
        "throttledSeconds": round(found.throttled_seconds, 3),
    }


def _stop(heartbeat: RankHeartbeat | None) -> float | None:
    """What it takes to leave with a snapshot: two steps, in which all ranks agree on it, and a save. As measured."""
    if heartbeat is None or heartbeat["saveSeconds"] is None:
        return None
    return round(2 * (heartbeat["stepSecondsP99"] or 0.0) + float(heartbeat["saveSeconds"]), 3)


def _eta(heartbeat: RankHeartbeat | None) -> float | None:
    """Steps that are left times the mean step of this attempt; pauses for validation and saves are not in it."""
    if heartbeat is None or heartbeat["step"] is None or heartbeat["totalSteps"] is None:
        return None
    steps = heartbeat["counters"]["stepSeconds"]
    count = sum(steps["counts"])
    left = max(0, heartbeat["totalSteps"] - heartbeat["step"])
    return round(left * steps["sum"] / count, 3) if count else None
