"""`ddpjob cancel`: what it says becomes of pods, snapshots and volume."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob_operator.follow.ending import cancelled_in_words, loses_its_volume, pods_in_words


def job(ready: int = 2, snapshot: bool = True, **spec: Any) -> dict[str, Any]:
    found = {"step": 400, "time": "2030-01-01T12:00:00Z", "verified": True}
    status = {"phase": "Running", "nodes": {"ready": ready, "total": 2}, "snapshot": found if snapshot else None}
    return {"metadata": {"name": "digits"}, "spec": spec, "status": status}


def test_a_volume_that_is_retained_is_said_to_be_kept_with_how_to_resume() -> None:
    assert cancelled_in_words(job(), kept=False) == (
        "digits is cancelled: its 2 pods save a snapshot and end",
        "kept: claim digits-shared, with snapshots and logs; so far the newest is the snapshot of step 400, verified",
        "to resume, apply the job again under the same name; to give up its files, kubectl delete pvc digits-shared",
    )


def test_a_volume_that_goes_with_the_job_is_said_to_go_unless_it_is_kept() -> None:
    gone = job(shared={"retain": False})
    assert loses_its_volume(gone)
    assert cancelled_in_words(gone, kept=False)[1:] == (
        "deleted with it: claim digits-shared (spec.shared.retain: false)",
    )
    assert cancelled_in_words(gone, kept=True)[1].startswith("kept: claim digits-shared")


def test_the_users_own_claim_is_never_said_to_go() -> None:
    own = job(snapshot=False, shared={"claimName": "mine", "retain": False})
    assert not loses_its_volume(own)
    assert cancelled_in_words(own, kept=False)[1:] == (
        "kept: claim mine, with snapshots and logs",
        "to resume, apply the job again under the same name",
    )


def test_a_job_that_begins_anew_is_said_to_need_a_change_to_resume() -> None:
    *_, last = cancelled_in_words(job(snapshots={"resume": "Own"}), kept=False)
    assert last.startswith("to resume, apply the job again under the same name with spec.snapshots.resume: Any;")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (job(0), "it has no pod that trains"),
        (job(1), "its pod saves a snapshot and ends"),
        (
            job(2, entrypoint={"script": "/mnt/shared/train.py"}),
            "its 2 pods save a snapshot, if the script makes snapshots, and end",
        ),
        (
            job(1, entrypoint={"module": "mine.train"}),
            "its pod saves a snapshot, if the script makes snapshots, and ends",
        ),
        (job(1, entrypoint={"module": "ddp_trainer.train"}), "its pod saves a snapshot and ends"),
    ],
)
def test_what_the_pods_do_is_said_as_it_is(found: dict[str, Any], words: str) -> None:
    assert pods_in_words(found) == words
