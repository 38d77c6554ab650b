"""`ddpjob snapshots`: what is on record, and when snapshots may be removed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.follow.snapshots import on_record, why_not_now

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


def test_the_newest_and_those_set_aside_are_on_record() -> None:
    status = DDPJobStatus.model_validate(
        {
            "snapshot": {"step": 400, "time": "2030-01-01T11:55:00Z", "verified": True},
            "corruptSnapshots": ["step 300: model.pt has another checksum"],
        }
    )
    assert on_record(status, NOW) == [
        "step        400  2030-01-01 11:55:00 UTC  verified, newest, 5m ago",
        "set aside: step 300: model.pt has another checksum",
    ]
    assert on_record(DDPJobStatus(), NOW) == []


def pod(phase: PodPhase) -> PodView:
    return PodView("digits-0-0", "uid", 0, 0, phase)


@pytest.mark.parametrize(
    ("phase", "pods", "refusal"),
    [
        ("Running", [pod(PodPhase.RUNNING)], "its pods digits-0-0 use them; ddpjob suspend digits first"),
        ("Suspended", [pod(PodPhase.RUNNING)], "its pods digits-0-0 use them"),
        ("Restarting", [], "it is Restarting"),
        ("Suspended", [pod(PodPhase.SUCCEEDED)], ""),
        ("Suspended", [], ""),
        ("Failed", [], ""),
        ("Succeeded", [pod(PodPhase.SUCCEEDED)], ""),
        (None, [], ""),
    ],
)
def test_snapshots_are_changed_only_while_no_pod_uses_them(
    phase: str | None, pods: list[PodView], refusal: str
) -> None:
    said = why_not_now("digits", DDPJobStatus.model_validate({"phase": phase}), pods, "restored")
    assert refusal in said
    assert said.startswith("snapshots of digits cannot be restored now: " if refusal else "")
    assert bool(said) is bool(refusal)
