"""What a trainer reports, as a status says it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from builders import DEFAULTS, NOW, UID, heard, in_phase, later, make_job, make_pod, seen, succeeded
from hypothesis import given
from hypothesis import strategies as st
from looks import at

from ddpjob_operator.api.status import DDPJobStatus, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.ledger.progress import MESSAGE_LIMIT, failure_status, with_final_report, with_report
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.observed import PodView, Termination
from ddpjob_operator.core.values.trainer_report import MOST_ITEMS, TerminationReport, read_status

TIME = NOW.timestamp()
REPORT = {
    "version": 1, "uid": UID, "attempt": 0, "time": TIME, "epoch": 3, "step": 120, "totalSteps": 400, "loss": 0.25,
    "samplesPerSecond": 900.5, "etaSeconds": 20.0, "metrics": {"eval_accuracy": 0.96},
    "snapshot": {"step": 100, "time": TIME - 5, "verified": True},
}  # fmt: skip


def after(reported: Any, status: DDPJobStatus | None = None, now: datetime = NOW) -> DDPJobStatus:
    report = reported and heard(**reported)
    return with_report(replace(at(make_job(status), seen(report=report)), now=now)).status


def test_a_report_becomes_progress_and_snapshot() -> None:
    status = after(REPORT)
    assert status.progress is not None
    assert status.snapshot is not None
    assert status.progress.model_dump() == {
        "epoch": 3, "step": 120, "total_steps": 400, "loss": 0.25, "samples_per_second": 900.5, "eta": later(20),
        "remaining_seconds": 20, "metrics": {"eval_accuracy": 0.96},
    }  # fmt: skip
    assert status.snapshot.model_dump() == {"step": 100, "time": later(-5), "verified": True}


def test_metrics_that_a_report_leaves_out_keep_their_value() -> None:
    """As a termination message does that has no room for all of them."""
    status = after(REPORT | {"metrics": {"eval_accuracy": 0.5, "eval_loss": 2.0}})
    final = with_final_report(status, heard(**REPORT | {"metrics": {"eval_loss": 1.0}}), NOW)
    assert final.progress is not None
    assert final.progress.metrics == {"eval_accuracy": 0.5, "eval_loss": 1.0}
    many = with_final_report(status, heard(**REPORT | {"metrics": {f"m{n}": 0.0 for n in range(MOST_ITEMS - 1)}}), NOW)
    assert many.progress is not None
    assert many.progress.metrics is not None
    assert len(many.progress.metrics) == MOST_ITEMS


def test_a_figure_has_six_digits() -> None:
    """kubectl get prints every digit that there is."""
    status = after(REPORT | {"loss": 0.12345678, "metrics": {"eval_accuracy": 0.9861111111111112}})
    assert status.progress is not None
    assert (status.progress.loss, status.progress.metrics) == (0.123457, {"eval_accuracy": 0.986111})


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(None, id="no report"),
        pytest.param(REPORT | {"uid": "another"}, id="another pod of the same name"),
        pytest.param(REPORT | {"attempt": 1}, id="another attempt"),
    ],
)
def test_what_is_not_about_this_attempt_of_this_job_changes_nothing(report: Any) -> None:
    assert after(report) == DDPJobStatus()


def test_the_same_report_looked_at_later_says_the_same() -> None:
    first = after(REPORT)
    assert after(REPORT, first, now=later(3600)) == first


def test_what_a_report_does_not_know_stays_as_it_was() -> None:
    status = after({"step": 130, "loss": None}, after(REPORT))
    assert status.progress is not None
    assert (status.progress.step, status.progress.loss, status.progress.metrics) == (130, 0.25, {"eval_accuracy": 0.96})


DONE: dict[str, Any] = {"succeeded_nodes": (0,)}


@pytest.mark.parametrize(
    ("pods", "known", "step", "kept"),
    [
        pytest.param([make_pod(0)], DONE, 90, False, id="it went back to a snapshot"),
        pytest.param([make_pod(0, ready=False)], DONE, 90, False, id="not ready for a moment"),
        pytest.param([make_pod(0, deleting=True)], DONE, 90, False, id="it still saves"),
        pytest.param([succeeded(0), make_pod(1)], DONE, 90, True, id="it has succeeded"),
        pytest.param([make_pod(1)], DONE, 90, True, id="its pod is gone"),
        pytest.param([], DONE, 120, True, id="no pod, and the same step"),
        pytest.param([], DONE, 130, False, id="heard after the last look at its pod"),
        pytest.param([make_pod(1)], {"succeeded_nodes": (1,)}, 90, False, id="another one has succeeded"),
        pytest.param([make_pod(1)], {}, 90, False, id="none has, and what is known may be of the attempt before"),
        pytest.param([], {"phase": Phase.SUSPENDED}, 90, True, id="it was suspended"),
        pytest.param([make_pod(0), make_pod(1)], DONE | {"lost_pods": {"pod-0-0": 0}}, 90, False, id="another tells"),
        pytest.param([make_pod(0)], DONE | {"lost_pods": {"pod-0-0": 0}}, 90, True, id="none else tells"),
    ],
)
def test_an_older_report_does_not_take_the_place_of_what_was_said_at_the_end(
    pods: list[PodView], known: dict[str, Any], step: int, kept: bool
) -> None:
    phase = known.get("phase", Phase.RUNNING)
    record = {name: value for name, value in known.items() if name != "phase"}
    status = in_phase(phase, progress=Progress(step=120, metrics={"eval_accuracy": 0.97}), **record)
    report = heard(step=step, metrics={"eval_accuracy": 0.5}, snapshot=REPORT["snapshot"])
    found = with_report(at(make_job(status), seen(*pods, report=report))).status
    assert found.progress is not None
    assert found.snapshot is not None
    assert (found.progress.step, found.snapshot.step) == (120 if kept else step, 100)
    assert found.progress.metrics == {"eval_accuracy": 0.97 if kept else 0.5}


def test_a_failure_soon_after_a_resume_is_at_its_own_step() -> None:
    """What the attempt before has reached is further, and on record until the next report is written."""
    status = in_phase(Phase.RUNNING, attempt=1, progress=Progress(step=105))
    pods = (make_pod(0, "Failed", attempt=1, termination=Termination(137, reason="OOMKilled")), make_pod(1, attempt=1))
    decided = plan(make_job(status), seen(*pods, report=heard(attempt=1, step=103), attempt=1), NOW, DEFAULTS)
    assert decided.status.last_failure is not None
    assert (decided.status.last_failure.reason, decided.status.last_failure.step) == ("OOMKilled", 103)


@pytest.mark.parametrize(
    ("known", "found", "kept"),
    [
        pytest.param((100, True), (120, False), (120, False), id="a newer snapshot is taken"),
        pytest.param((100, True), (80, True), (100, True), id="an older one is not"),
        pytest.param((100, False), (100, True), (100, True), id="the same one, verified, is taken"),
        pytest.param((100, True), (100, False), (100, True), id="what was verified stays verified"),
    ],
)
def test_the_newest_snapshot_is_kept(known: tuple[int, bool], found: tuple[int, bool], kept: tuple[int, bool]) -> None:
    status = DDPJobStatus(snapshot=SnapshotStatus(step=known[0], time=NOW, verified=known[1]))
    report = heard(snapshot={"step": found[0], "time": TIME, "verified": found[1]})
    snapshot = with_final_report(status, report, NOW).snapshot
    assert snapshot is not None
    assert (snapshot.step, snapshot.verified) == kept


def test_a_job_that_went_back_has_its_first_snapshot_since_as_the_newest() -> None:
    status = DDPJobStatus(snapshot=SnapshotStatus(step=600, time=NOW, verified=True))
    restored = with_final_report(status, heard(snapshot={"step": 300, "time": TIME - 60, "verified": True}), NOW)
    assert restored.snapshot == status.snapshot, "older than what is on record, as a late report is too"
    saved = with_final_report(status, heard(snapshot={"step": 320, "time": TIME + 60, "verified": True}), NOW)
    assert saved.snapshot is not None
    assert saved.snapshot.step == 320


@pytest.mark.parametrize(
    ("begun", "resumed_from", "step"),
    [(later(30), 300, 300), (later(30), None, 600), (later(-30), 300, 600), (None, 300, 600)],
    ids=[
        "it resumed from it",
        "nobody says what from",
        "an older report of an attempt that saves",
        "nobody knows when",
    ],
)
def test_an_attempt_that_went_back_has_no_newer_snapshot_than_the_one_that_it_resumed_from(
    begun: datetime | None, resumed_from: int | None, step: int
) -> None:
    """Newer ones were removed with a loss that is not finite, did not verify, or were set aside by the user."""
    status = DDPJobStatus(attempt_start_time=begun, snapshot=SnapshotStatus(step=600, time=NOW, verified=True))
    older = {"step": 300, "time": TIME - 60, "verified": True}
    snapshot = after(REPORT | {"step": 310, "resumedFromStep": resumed_from, "snapshot": older}, status).snapshot
    assert snapshot is not None
    assert snapshot.step == step


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("\ud800"), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(sorted(REPORT)), anything),
    st.dictionaries(st.sampled_from(("step", "time")), anything),
)
def test_whatever_a_container_reports_the_status_can_be_written(
    fields: dict[str, Any], snapshot: dict[str, Any]
) -> None:
    report = REPORT | fields
    if "snapshot" not in fields:
        report["snapshot"] = {"step": 100, "time": TIME} | snapshot
    status = with_final_report(DDPJobStatus(), read_status(json.dumps(report)), NOW)
    wire = json.loads(json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True), allow_nan=False))
    assert DDPJobStatus.model_validate(wire) == status


def test_the_post_mortem_keeps_what_the_pods_take_with_them() -> None:
    failure = Failure("WorkerKilled", "killed", Retry.YES, "digits-0-1", "node-1", 1, 3, 137, None)
    found = failure_status(after(REPORT), failure, NOW)
    assert (found.pod_name, found.node_name, found.node_rank, found.rank) == ("digits-0-1", "node-1", 1, 3)
    assert (found.exit_code, found.reason, found.step, found.snapshot_step) == (137, "WorkerKilled", 120, 100)
    assert found.time == NOW.astimezone(UTC)
    assert found.advice


def test_the_step_that_the_failing_rank_told_wins_over_the_last_report() -> None:
    assert failure_status(after(REPORT), Failure("X", "", Retry.YES, step=125), NOW).step == 125


def test_the_advice_names_the_snapshot_that_the_job_applied_again_resumes_from() -> None:
    report = TerminationReport(
        exception="ValueError: x", traceback='  File "/mnt/shared/train.py", line 7, in <module>'
    )
    failure = Failure("WorkerException", "rank 0 raised ValueError: x", Retry.YES, report=report)
    what = "Correct the ValueError in train.py, line 7, and apply the job again"
    assert failure_status(after(REPORT), failure, NOW).advice == f"{what}: it resumes from the snapshot of step 100."
    assert failure_status(DDPJobStatus(), failure, NOW).advice == f"{what}; it has no snapshot to resume from."


def test_a_long_message_is_cut() -> None:
    assert len(failure_status(DDPJobStatus(), Failure("X", "m" * 9000, Retry.YES), NOW).message) == MESSAGE_LIMIT
