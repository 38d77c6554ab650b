"""`ddpjob why`: for each phase, the answer has what a person needs to know, once, and the headline says the most."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.names import job_labels
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.follow.why import Seen, Warned, why

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
FAILURE = {
    "attempt": 2,
    "time": NOW - timedelta(minutes=5),
    "nodeRank": 1,
    "rank": 3,
    "podName": "digits-2-1",
    "nodeName": "worker-3",
    "exitCode": 1,
    "reason": "WorkerException",
    "message": "rank 3 raised FileNotFoundError: data.pt\nat train.py:12",
    "step": 340,
    "advice": "Fix the exception, then apply the job again.",
    "logTail": "reading data\nFileNotFoundError: data.pt",
}


def seen(*pods: PodView, spec: dict[str, Any] | None = None, warnings: tuple[Warned, ...] = (), **status: Any) -> Seen:
    times = {"startTime": NOW - timedelta(hours=1), "attemptStartTime": NOW - timedelta(minutes=30)}
    given = (times | status) if status else {}
    return Seen(
        name="digits",
        created=NOW - timedelta(hours=1),
        spec=DDPJobSpec.model_validate({"nodes": 2} | (spec or {})),
        status=DDPJobStatus.model_validate(given),
        pods=pods,
        warnings=warnings,
        now=NOW,
    )


def condition(kind: str, reason: str, message: str, value: str = "True") -> dict[str, Any]:
    since = NOW - timedelta(minutes=4)
    return {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": since}


def waiting_pod(name: str, reason: str = "", message: str = "", **more: Any) -> PodView:
    return PodView(name, name, 0, 0, PodPhase.PENDING, reason=reason, message=message, **more)


def test_a_job_that_no_operator_has_seen_leads_to_the_operator() -> None:
    text = why(seen()).text()
    assert text.startswith("digits: applied 1h00m ago, and no operator has acted on it")
    assert "app.kubernetes.io/name=ddpjob-operator" in text


def test_a_job_of_another_controller_names_it() -> None:
    text = why(seen(spec={"managedBy": "kueue.x-k8s.io/multikueue"})).text()
    assert "left to another controller (spec.managedBy: kueue.x-k8s.io/multikueue)" in text
    assert "no operator" not in text


def test_a_job_that_is_being_deleted_says_what_holds_it_and_nothing_of_its_phase() -> None:
    pods = (
        PodView("digits-0-0", "a", 0, 0, PodPhase.RUNNING, ready=True, deleting=True, node_name="worker-1"),
        PodView("digits-0-1", "b", 0, 1, PodPhase.SUCCEEDED, node_name="worker-2"),
    )
    finalizers = ("foregroundDeletion", "example.com/hold")
    running = replace(seen(*pods, phase="Running"), deleted=NOW - timedelta(minutes=5), finalizers=finalizers)
    answer = why(running)
    assert answer.headline == "digits: its deletion was asked for 5m00s ago"
    assert {section.title: section.lines for section in answer.sections} == {
        "Waits for": (
            "foreground deletion: the job goes when all pods and whatever else it owns are gone",
            "finalizers: example.com/hold; each is removed by whatever has set it",
        ),
        "Pods that are left": (
            "digits-0-0: is being deleted, node worker-1",
            "digits-0-1: Succeeded on node worker-2",
        ),
    }


@pytest.mark.parametrize(
    ("finalizers", "phase", "is_deleting", "said"),
    [
        (("example.com/hold",), PodPhase.RUNNING, False, True),
        (("example.com/hold",), PodPhase.RUNNING, True, False),
        (("example.com/hold",), PodPhase.SUCCEEDED, False, False),
        (("foregroundDeletion", "example.com/hold"), PodPhase.RUNNING, False, False),
        (("foregroundDeletion",), PodPhase.RUNNING, False, False),
    ],
)
def test_pods_that_run_on_while_a_finalizer_holds_the_deleted_job_can_be_ended(
    finalizers: tuple[str, ...], phase: PodPhase, is_deleting: bool, said: bool
) -> None:
    pod = PodView("digits-0-0", "a", 0, 0, phase, ready=True, deleting=is_deleting, node_name="worker-1")
    deleted = NOW - timedelta(minutes=5)
    held = replace(seen(pod, phase="Running"), deleted=deleted, finalizers=finalizers, namespace="ml")
    command = "kubectl delete pods -n ml -l training.ddpjob.io/job=digits"
    assert (command in why(held).text()) is said


def test_pods_of_a_job_whose_name_is_no_label_are_named_by_the_label_that_they_have() -> None:
    pod = PodView("bert-0-0", "a", 0, 0, PodPhase.RUNNING, ready=True, node_name="worker-1")
    held = replace(seen(pod, phase="Running"), name="bert.v2", deleted=NOW, finalizers=("example.com/hold",))
    label = job_labels("bert.v2", "uid")["training.ddpjob.io/job"]
    assert label != "bert.v2"
    assert f"kubectl delete pods -l training.ddpjob.io/job={label}\n" in f"{why(held).text()}\n"


def failed(**status: Any) -> Seen:
    return seen(
        phase="Failed",
        attempt=2,
        restarts=2,
        completionTime=NOW - timedelta(minutes=4),
        lastFailure=FAILURE,
        failures=[FAILURE | {"attempt": 1, "podName": "digits-1-0", "reason": "NodeLost", "message": "gone"}, FAILURE],
        **status,
    )


def test_a_failed_job_says_what_ended_it_its_cause_where_and_what_to_do() -> None:
    answer = why(
        failed(
            conditions=[condition("Failed", "RepeatedFailure", "the same error twice before the first step")],
            goodput={"recomputedSteps": 12, "recovering": 75.0},
            excludedNodes=["worker-3"],
        )
    )
    assert answer.headline == "digits: Failed (RepeatedFailure) 4m00s ago"
    found = {section.title: section.lines for section in answer.sections}
    assert list(found) == [
        "Ended", "Cause", "Last lines of digits-2-1", "Lost", "Earlier failures", "What to do"
    ]  # fmt: skip
    assert found["Ended"][1] == "the same error twice before the first step"
    assert found["Cause"] == (
        "WorkerException: The training program ended with an exception or an exit code.",
        "rank 3 raised FileNotFoundError: data.pt",
        "at train.py:12",
        "rank 3 of pod digits-2-1 on node worker-3, attempt 2, step 340, exit code 1",
    )
    assert found["Last lines of digits-2-1"] == ("reading data", "FileNotFoundError: data.pt")
    assert found["Lost"][0] == "12 steps lost with failures or taken back by a restore"
    assert found["Lost"][2] == "nodes no longer used: worker-3"
    assert len(found["Earlier failures"]) == 1
    assert "NodeLost: gone" in found["Earlier failures"][0]
    assert found["What to do"] == ("Fix the exception, then apply the job again.",)


def test_a_job_that_failed_for_its_last_failure_says_it_once() -> None:
    answer = why(
        failed(conditions=[condition("Failed", "WorkerException", "rank 3 raised FileNotFoundError: data.pt")])
    )
    assert "Ended" not in [section.title for section in answer.sections]
    assert answer.text().count("rank 3 raised FileNotFoundError") == 1


def test_a_job_that_failed_before_any_pod_has_the_action_of_the_reason() -> None:
    answer = why(
        seen(phase="Failed", completionTime=NOW, conditions=[condition("Failed", "InvalidSpec", "spec.nodes: 0")])
    )
    assert answer.headline == "digits: Failed (InvalidSpec) 0s ago"
    assert "spec.nodes: 0" in answer.text()
    assert "Correct the fields that the message names." in answer.text()


def test_a_restart_waits_for_its_pods_and_not_for_the_failure_before() -> None:
    lost = condition("Scheduled", "PodDeleted", "", "False")
    answer = why(seen(phase="Restarting", attempt=3, nodes={"ready": 1, "total": 2}, conditions=[lost]))
    assert answer.headline == "digits: Restarting for 30m00s: 1 of 2 pods are ready"


def test_a_terminal_obeys_nothing_that_a_job_has_said() -> None:
    evil = "\x1b]0;title\x07\x1b[2J"
    failure = FAILURE | {"message": f"{evil}one", "advice": f"{evil}two", "logTail": f"first\n{evil}three"}
    text = why(seen(phase="Failed", completionTime=NOW, lastFailure=failure)).text()
    text += why(seen(waiting_pod("digits-0-0", "ErrImagePull", f"{evil}four"), phase="Starting")).text()
    assert [part for part in ("one", "two", "three", "four") if f"]0;title[2J{part}" not in text] == []
    assert text.replace("\n", "").isprintable()


SIGNALLED = FAILURE | {"signal": "SIGKILL", "exitCode": 137, "rank": None, "reason": "OOMKilled"}


def test_a_signal_is_named_instead_of_the_exit_code_that_stands_for_it() -> None:
    text = why(seen(phase="Failed", lastFailure=SIGNALLED)).text()
    assert "pod digits-2-1 on node worker-3, attempt 2, step 340, SIGKILL" in text
    assert "137" not in text


@pytest.mark.parametrize(
    ("status", "waits", "todo"),
    [
        (
            {"conditions": [condition("Degraded", "Unschedulable", "pod digits-0-1: 0/3 nodes. Add nodes.")]},
            "Unschedulable: pod digits-0-1: 0/3 nodes. Add nodes.",
            "",
        ),
        (
            {"conditions": [condition("Scheduled", "SchedulingGated", "pod digits-0-0: gated", "False")]},
            "SchedulingGated: pod digits-0-0: gated",
            "Wait for the queue.",
        ),
        (
            {"conditions": [condition("Initialized", "Initializing", "pod digits-init-0 runs", "False")]},
            "initializers: pod digits-init-0 runs",
            "",
        ),
        (
            {
                "conditions": [condition("Initialized", "InitializerFailed", "404 for s3://bucket/x", "False")],
                "retryAt": NOW + timedelta(seconds=40),
            },
            "initializers: 404 for s3://bucket/x; retried in 40s",
            "Correct the source",
        ),
        (
            {
                "conditions": [condition("Initialized", "Initializing", "pod digits-init-1 runs", "False")],
                "retryAt": NOW - timedelta(minutes=10),
            },
            "initializers: pod digits-init-1 runs",
            "",
        ),
        (
            {"phase": "Restarting", "restartAt": NOW + timedelta(seconds=25)},
            "backoff after a failure, 25s left (restart.backoff)",
            "",
        ),
        ({"nodes": {"ready": 1, "total": 2}}, "1 of 2 pods are ready", ""),
    ],
)
def test_a_waiting_job_says_what_it_waits_for(status: dict[str, Any], waits: str, todo: str) -> None:
    answer = why(seen(**({"phase": "Starting"} | status)))
    assert answer.headline.endswith(f"for 30m00s: {waits}")
    assert todo in answer.text()


def test_pods_that_wait_for_the_same_are_said_once_and_the_others_by_name() -> None:
    full = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    pods = [waiting_pod(f"digits-0-{rank}", "Unschedulable", full) for rank in range(5)]
    ready = PodView("digits-0-6", "digits-0-6", 0, 6, PodPhase.RUNNING, ready=True)
    text = why(seen(*pods, waiting_pod("digits-0-5", node_name="worker-1"), ready, phase="Starting")).text()
    assert f"digits-0-0, digits-0-1, digits-0-2 and 2 more: Unschedulable: {full}" in text
    assert "digits-0-5: starting on node worker-1" in text
    assert "digits-0-6" not in text
    held = waiting_pod("digits-0-5", node_name="worker-1", init_running="vault-agent-init")
    text = why(seen(held, phase="Starting")).text()
    assert "digits-0-5: starting on node worker-1: its init container vault-agent-init runs" in text


def test_the_newest_warning_of_each_object_and_reason_is_shown() -> None:
    warnings = tuple(
        Warned(NOW - timedelta(minutes=minutes), "digits-0-1", "FailedMount", f"no secret, {minutes}")
        for minutes in (9, 6, 3)
    )
    text = why(seen(phase="Starting", warnings=warnings)).text()
    assert "3m00s ago  digits-0-1: FailedMount: no secret, 3" in text
    assert "no secret, 9" not in text


def test_a_restart_names_the_failure_before_it_and_not_an_older_one() -> None:
    restarting = seen(phase="Restarting", attempt=3, lastFailure=FAILURE)
    assert "Cause of the restart" in why(restarting).text()
    later = replace(restarting, status=restarting.status.model_copy(update={"attempt": 5}))
    assert "Cause of the restart" not in why(later).text()


def test_a_running_job_says_how_far_it_is_what_it_complains_of_and_where_its_time_went() -> None:
    answer = why(
        seen(
            phase="Running",
            restarts=1,
            progress={"step": 412, "totalSteps": 1000, "loss": 0.25},
            snapshot={"step": 400, "time": NOW - timedelta(seconds=20), "verified": True},
            conditions=[condition("SnapshotsFailing", "SavesFail", "No space left on device")],
            goodput={"training": 700.0, "recovering": 150.0, "saving": 10.0, "queued": 40.0, "unknown": 100.0},
        )
    )
    assert answer.headline == "digits: Running for 30m00s, attempt 0, restarts 1"
    found = {section.title: section.lines for section in answer.sections}
    assert found["Progress"] == (
        "step 412/1000 (41%), loss 0.25",
        "snapshot of step 400, verified, 20s ago",
    )
    assert found["Needs attention"][0] == "SavesFail: No space left on device"
    assert found["Needs attention"][1].startswith("Read the message. Check free space")
    assert found["Time"] == (
        " 70%  training, 11m40s",
        " 15%  recovering, 2m30s",
        " 10%  unknown, such as imports before a first step, 1m40s",
    )


@pytest.mark.parametrize("phase", ["Running", "Restarting"])
def test_a_job_is_in_its_phase_since_then_however_long_ago_the_attempt_began(phase: str) -> None:
    """It may have waited for nodes until then."""
    other = "Restarting" if phase == "Running" else "Running"
    conditions = [condition(other, "GangRunning", "", "False"), condition(phase, "GangRunning", "2 of 2 pods run")]
    assert why(seen(phase=phase, conditions=conditions)).headline.startswith(f"digits: {phase} for 4m00s")


def test_a_job_that_has_just_begun_has_spent_no_time() -> None:
    answer = why(seen(phase="Running", goodput={"queued": 0.2}))
    assert "Time" not in [section.title for section in answer.sections]


def test_a_running_job_names_the_spares_that_have_taken_places() -> None:
    kept = {"digits-0-s1": 0, "digits-0-s0": 2, "digits-0-1": 1, "digits-0-s2": -1}
    answer = why(seen(phase="Running", restarts=2, liveRecoveries=2, internal={"keptPods": kept}))
    found = {section.title: section.lines for section in answer.sections}
    assert found["Spares"] == (
        "digits-0-s1 has taken the place of node rank 0",
        "digits-0-s0 has taken the place of node rank 2",
    )


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_a_loss_that_is_not_finite_needs_attention_also_once_the_job_has_succeeded(phase: str) -> None:
    answer = why(
        seen(
            phase=phase,
            completionTime=NOW if phase == "Succeeded" else None,
            conditions=[condition("LossNotFinite", "NonFiniteLoss", "the loss is NaN or infinite since step 12")],
        )
    )
    (found,) = (section.lines for section in answer.sections if section.title == "Needs attention")
    assert found[0] == "NonFiniteLoss: the loss is NaN or infinite since step 12"
    assert found[1].startswith("Lower the learning rate, clip gradients, or check the data.")


def test_what_a_job_that_has_succeeded_had_complained_of_is_over() -> None:
    conditions = [condition("SnapshotsFailing", "SavesFail", "No space left on device")]
    assert "SavesFail" not in why(seen(phase="Succeeded", completionTime=NOW, conditions=conditions)).text()


def test_a_suspended_job_says_who_resumes_it() -> None:
    alone = why(seen(phase="Suspended", conditions=[condition("Suspended", "Suspended", "")]))
    assert alone.headline == "digits: Suspended for 4m00s"
    assert "ddpjob unsuspend digits resumes it" in alone.text()
    queued = why(seen(phase="Suspended", spec={"scheduling": {"queue": "team-a"}})).text()
    assert "ddpjob unsuspend digits resumes it" in queued, "no queue changes spec.suspend: it holds back pods"
    assert "Its pods then wait in the queue team-a." in queued


def test_a_job_that_succeeded_says_how_long_it_took() -> None:
    answer = why(
        seen(phase="Succeeded", completionTime=NOW - timedelta(minutes=2), progress={"step": 10, "totalSteps": 10})
    )
    assert answer.headline == "digits: Succeeded 2m00s ago, after 58m00s"
