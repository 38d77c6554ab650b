"""What one pod reports: `/status` of docs/contracts.md section 4, from the heartbeats of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_trainer.environment import PodEnvironment

Beat = Mapping[str, Any]

_PROGRESS = ("epoch", "step", "totalSteps", "samples", "loss", "samplesPerSecond")
_REPORTED = (*_PROGRESS, "snapshot", "resumedFromStep", "metrics")
_OF_SNAPSHOTS = ("snapshotInterval", "snapshotProblem", "snapshotsSetAside")


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known at one moment: monotonic and wall clock in seconds, registrations and heartbeats by rank."""

    now: float
    wall: float
    ranks: Sequence[Mapping[str, Any]]
    beats: Sequence[Beat]
    idle: str | None = None
    """`spare` or `waiting` where no rank runs, because the pod has no place in the gang or its life is over."""

    ended: Mapping[str, Any] | None = None
    """What the termination message would say of the life that is over."""


def progress(beats: Sequence[Beat]) -> dict[str, Any]:
    """How far this pod is: the lowest rank's view, its newest snapshot by any rank. Unknown fields are None."""
    first: Beat = beats[0] if beats else {}
    report = {name: first.get(name) for name in _REPORTED}
    snapshots = [beat["snapshot"] for beat in beats if beat.get("snapshot")]
    report["snapshot"] = max(snapshots, key=lambda snapshot: snapshot["step"], default=None)
    # a value that only rank 0 measures is still reported where rank 0 is not the first here
    report["metrics"] = {name: value for beat in reversed(beats) for name, value in beat.get("metrics", {}).items()}
    return report


def phase_seconds(beat: Beat | None, now: float) -> dict[str, float]:
    """Seconds that a rank has spent in each phase of this life, the one it is in until its last sign of life.

    Time that training stood still for a snapshot counts as `save`, not as `train`.
    """
    if beat is None:
        return {}
    seconds = dict(beat.get("phaseSeconds", {}))
    seconds[beat["phase"]] = seconds.get(beat["phase"], 0.0) + max(0.0, min(now, beat["time"]) - beat["phaseTime"])
    stood = min(beat["counters"]["stallSeconds"]["sum"], seconds.get("train", 0.0))
    if stood:
        seconds["train"] -= stood
        seconds["save"] = seconds.get("save", 0.0) + stood
    return {phase: round(spent, 3) for phase, spent in seconds.items()}


def status(pod: PodEnvironment, start_time: float, moment: Moment) -> dict[str, Any]:
    """The JSON of `/status`. `start_time` is when this life, or the wait for the next, began, in epoch seconds."""
    first: Beat | None = moment.beats[0] if moment.beats else None
    phase = moment.idle or (first["phase"] if first else "init" if moment.ranks else "rendezvous")
    began = start_time - moment.wall if first is None or moment.idle else first["phaseTime"] - moment.now
    known = progress(moment.beats)
    beats = {beat["rank"]: beat for beat in moment.beats}
    return {
        "version": 1,
        "job": pod.job,
        "uid": pod.uid,
        "attempt": pod.attempt,
        "nodeRank": pod.node_rank,
        "worldSize": pod.world_size,
        "phase": phase,
        "phaseSeconds": round(-began, 3),
        "seconds": phase_seconds(first, moment.now),
        "time": moment.wall,
        "startTime": start_time,
        **{name: known[name] for name in _PROGRESS},
        "etaSeconds": _eta(first),
        "snapshot": known["snapshot"],
        # of rank 0, which writes them; on other nodes nothing is known
        **{name: first.get(name) if first else None for name in _OF_SNAPSHOTS},
        "resumedFromStep": known["resumedFromStep"],
        "metrics": known["metrics"],
        "ended": moment.ended,
        "ranks": [_rank(entry, beats.get(entry["rank"]), moment.now) for entry in moment.ranks],
    }


def _rank(entry: Mapping[str, Any], beat: Beat | None, now: float) -> dict[str, Any]:
    return {
        "rank": entry["rank"],
        "localRank": entry["localRank"],
        "phase": beat["phase"] if beat else None,
        "step": beat["step"] if beat else None,
        "ageSeconds": round(max(0.0, now - beat["time"]), 3) if beat else None,
        "pid": entry["pid"],
    }


def _eta(beat: Beat | None) -> float | None:
    """Steps that are left times the mean step of this life; pauses for validation and saves are not in it."""
    if beat is None or beat["step"] is None or beat["totalSteps"] is None:
        return None
    steps = beat["counters"]["stepSeconds"]
    count = sum(steps["counts"])
    left = max(0, beat["totalSteps"] - beat["step"])
    return round(left * steps["sum"] / count, 3) if count else None
