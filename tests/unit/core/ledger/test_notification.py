"""When the notification of a job's end is due, and what it says."""

from __future__ import annotations

import json

import pytest
from builders import NOW, UID, failed, in_phase, make_job, seen, succeeded
from looks import look

from ddpjob_operator.api.status import DDPJobStatus, Goodput, Notification, Phase, Progress
from ddpjob_operator.core.ledger.notification import (
    LONGEST_MESSAGE,
    end_event,
    is_pending,
    recorded_notification,
)
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import DeleteJob
from ddpjob_operator.core.values.changes import with_notification

PENDING, DELIVERED, FAILED = Notification.PENDING, Notification.DELIVERED, Notification.FAILED
METADATA = {"name": "digits", "namespace": "research", "uid": UID}
RUNNING = in_phase(Phase.RUNNING)


def over(notification: Notification | None, phase: Phase = Phase.SUCCEEDED) -> DDPJobStatus:
    return in_phase(phase, completion_time=NOW, notification=notification)


@pytest.mark.parametrize(
    ("before", "after", "outcome", "recorded"),
    [
        pytest.param(RUNNING, RUNNING, None, None, id="a job that is not over"),
        pytest.param(RUNNING, over(None), None, PENDING, id="with its end"),
        pytest.param(RUNNING, over(None, Phase.FAILED), None, PENDING, id="with its failure"),
        pytest.param(over(PENDING), over(PENDING), None, PENDING, id="until there is an outcome"),
        pytest.param(over(PENDING), over(PENDING), DELIVERED, DELIVERED, id="delivered"),
        pytest.param(over(PENDING), over(PENDING), FAILED, FAILED, id="not delivered"),
        pytest.param(over(DELIVERED), over(DELIVERED), FAILED, DELIVERED, id="the outcome stays"),
        pytest.param(over(None), over(None), None, None, id="a job that ended while notifications were off"),
    ],
)
def test_what_is_on_record(
    before: DDPJobStatus, after: DDPJobStatus, outcome: Notification | None, recorded: Notification | None
) -> None:
    found = recorded_notification(before, after, outcome)
    assert found.internal.notification is recorded
    assert is_pending(found) == (recorded is PENDING)
    assert with_notification(found, DELIVERED) == with_notification(after, DELIVERED), "nothing else is changed"


def test_the_event_of_a_job_that_succeeded() -> None:
    status = look(make_job(RUNNING), seen(succeeded(0), succeeded(1))).status.model_copy(
        update={"goodput": Goodput(ratio=0.5), "progress": Progress(step=400, total_steps=400), "restarts": 1}
    )
    job = make_job(status, code={"sha256": "ab" * 32, "configMaps": ["code-0"]})
    event = json.loads(json.dumps(end_event(METADATA, job, status)))
    data = event.pop("data")
    assert event == {
        "specversion": "1.0",
        "id": f"{UID}-Succeeded",
        "source": "/apis/training.ddpjob.io/v1alpha1/namespaces/research/ddpjobs/digits",
        "type": "io.ddpjob.training.job.succeeded",
        "subject": "research/digits",
        "time": "2026-01-02T03:04:05Z",
        "datacontenttype": "application/json",
    }
    assert data == {
        **METADATA,
        "phase": "Succeeded",
        "reason": "Completed",
        "message": "all 2 nodes finished; restarts: 0",
        "attempt": 0,
        "restarts": 1,
        "step": 400,
        "totalSteps": 400,
        "seconds": 240.0,
        "goodput": 0.5,
        "codeDigest": "ab" * 32,
    }


def test_the_event_of_a_job_that_failed_says_why_without_secrets() -> None:
    spec = {"restart": {"maxRestarts": 0}, "env": [{"name": "WANDB_API_KEY", "value": "hunter33"}]}
    status = look(make_job(in_phase(Phase.RUNNING, spec=spec), **spec), seen(failed(0, 1, "WorkerException"))).status
    message = "https://user:hunter22@example.com said: token=hf_0123456789abcdef hunter33" + " no" * LONGEST_MESSAGE
    conditions = cond.set_condition(status.conditions, cond.Update(cond.FAILED, True, "BackoffLimit", message), NOW, 1)
    event = end_event(METADATA, make_job(status, **spec), status.model_copy(update={"conditions": conditions}))
    data = event["data"]
    assert (event["id"], event["type"]) == (f"{UID}-Failed", "io.ddpjob.training.job.failed")
    assert (data["phase"], data["reason"]) == ("Failed", "BackoffLimit")
    assert data["message"].startswith("https://***@example.com said: token=*** *** no")
    assert len(data["message"]) == LONGEST_MESSAGE
    assert data["advice"].startswith("The training program failed.")


def test_a_job_whose_spec_cannot_be_read_has_an_event_too() -> None:
    said = cond.set_condition((), cond.Update(cond.FAILED, True, "InvalidSpec", "nodes: must be 1 or more"), NOW, 1)
    status = DDPJobStatus(phase=Phase.FAILED, conditions=said, completion_time=NOW)
    assert end_event(METADATA, None, status)["data"] == {
        **METADATA,
        "phase": "Failed",
        "reason": "InvalidSpec",
        "message": "nodes: must be 1 or more",
        "attempt": 0,
        "restarts": 0,
    }


@pytest.mark.parametrize(
    ("notification", "seconds", "deleted"),
    [(None, 1, True), (DELIVERED, 1, True), (FAILED, 1, True), (PENDING, 1, False), (PENDING, 600, True)],
)
def test_a_job_whose_time_to_live_is_over_waits_ten_minutes_for_a_pending_notification(
    notification: Notification | None, seconds: float, deleted: bool
) -> None:
    decided = look(make_job(over(notification), ttlSecondsAfterFinished=0), seen(), seconds)
    assert any(isinstance(action, DeleteJob) for action in decided.actions) == deleted
    assert deleted or decided.requeue_after == 600 - seconds
