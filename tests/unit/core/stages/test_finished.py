"""A job that is over: which pods go, and when the job itself does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import NOW, ended, failed, in_phase, later, make_job, make_pod, seen, succeeded
from looks import deleted, look

from ddpjob_operator.api.status import DDPJobStatus, Internal, Phase
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import DeleteJob, Plan
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, PodView

RUNS, ENDED = make_pod(0), failed(1, 1, "WorkerException")
SPARE = replace(make_pod(0), name="digits-0-s0", node_rank=None)
OVER = in_phase(Phase.FAILED, completion_time=NOW)


def missed_a_deadline() -> DDPJobStatus:
    said = cond.set_condition((), cond.Update(cond.FAILED, True, "DeadlineExceeded", ""), NOW, 1)
    return OVER.model_copy(update={"conditions": said})


@pytest.mark.parametrize(
    ("policy", "status", "gone"),
    [
        pytest.param("Running", OVER, ["digits-0-0", "digits-0-s0"], id="Running: what ended stays for its log"),
        pytest.param("All", OVER, ["digits-0-0", "digits-0-1", "digits-0-s0"], id="All"),
        pytest.param("None", OVER, ["digits-0-s0"], id="None: but a spare waits for nothing any more"),
        pytest.param("None", missed_a_deadline(), ["digits-0-0", "digits-0-s0"], id="None: but a deadline stops a job"),
        pytest.param("All", missed_a_deadline(), ["digits-0-0", "digits-0-1", "digits-0-s0"], id="All at a deadline"),
    ],
)
def test_which_pods_go_when_a_job_is_over(policy: str, status: DDPJobStatus, gone: list[str]) -> None:
    decided = look(make_job(status, cleanPodPolicy=policy), seen(RUNS, ENDED, SPARE))
    assert deleted(decided) == gone
    assert decided.status == status


@pytest.mark.parametrize(("phase", "goes"), [("Pending", True), ("Running", False)])
def test_a_pod_for_an_empty_place_that_has_not_begun_goes_in_any_case(phase: str, goes: bool) -> None:
    """With live recovery: it would take a node hours later, with nothing left to do."""
    status = OVER.model_copy(update={"internal": Internal(lost_pods={"pod-0-2": 2})})
    decided = look(make_job(status, nodes=3, cleanPodPolicy="None"), seen(ENDED, make_pod(2, phase)))
    assert deleted(decided) == (["digits-0-2"] if goes else [])


@pytest.mark.parametrize(
    ("exited", "gone"),
    [
        pytest.param(True, [], id="its containers have exited, and the phase will follow"),
        pytest.param(False, ["digits-0-0", "digits-0-1"], id="a sidecar of each goes on"),
    ],
)
def test_a_pod_that_has_exited_is_kept_for_its_log_although_its_phase_is_still_running(
    exited: bool, gone: list[str]
) -> None:
    pods = [make_pod(rank, "Running", termination=ended(0), exited=exited) for rank in (0, 1)]
    decided = look(make_job(in_phase(Phase.RUNNING)), seen(*pods))
    assert decided.status.phase is Phase.SUCCEEDED
    assert deleted(decided) == gone
    assert deleted(look(make_job(decided.status), seen(*pods))) == gone


@pytest.mark.parametrize(
    ("policy", "gone"), [("Running", ["digits-0-0"]), ("All", ["digits-0-0", "digits-0-1"]), ("None", [])]
)
def test_they_go_in_the_same_look_that_fails_the_job_once_that_is_on_record(policy: str, gone: list[str]) -> None:
    job = make_job(in_phase(Phase.RUNNING), cleanPodPolicy=policy)
    decided = look(job, seen(RUNS, failed(1, 64, "UserError")))
    assert (decided.status.phase, decided.status_first) == (Phase.FAILED, True)
    assert deleted(decided) == gone


@pytest.mark.parametrize(
    ("policy", "pods", "gone"),
    [
        pytest.param("Running", [succeeded(0), succeeded(1)], [], id="nothing runs"),
        pytest.param("All", [succeeded(0), succeeded(1)], ["digits-0-0", "digits-0-1"], id="all go"),
        pytest.param("Running", [succeeded(0), make_pod(1)], ["digits-0-1"], id="the other node is stopped"),
        pytest.param("None", [succeeded(0), make_pod(1)], [], id="the other node goes on"),
        pytest.param("None", [succeeded(0), make_pod(1), SPARE], ["digits-0-s0"], id="a spare is stopped"),
    ],
)
def test_pods_that_go_after_a_success_go_once_it_is_on_record(
    policy: str, pods: list[PodView], gone: list[str]
) -> None:
    job = make_job(in_phase(Phase.RUNNING), cleanPodPolicy=policy, successPolicy="FirstNode")
    decided = look(job, seen(*pods))
    assert (decided.status.phase, deleted(decided)) == (Phase.SUCCEEDED, gone)
    assert decided.status_first is bool(gone)


@pytest.mark.parametrize(
    ("policy", "phase", "gone"),
    [
        ("Running", PodPhase.RUNNING, True),
        ("Running", PodPhase.FAILED, False),
        ("All", PodPhase.SUCCEEDED, True),
        ("None", PodPhase.RUNNING, False),
    ],
)
def test_the_pod_that_fetched_data_goes_as_the_others_do(policy: str, phase: PodPhase, gone: bool) -> None:
    fetched = InitializerView("digits-init", "uid", phase)
    decided = look(make_job(OVER, cleanPodPolicy=policy), seen(initializer=fetched))
    assert deleted(decided) == (["digits-init"] if gone else [])


@pytest.mark.parametrize(
    ("phase", "gone"), [(PodPhase.RUNNING, True), (PodPhase.PENDING, True), (PodPhase.FAILED, False)]
)
def test_a_deadline_stops_the_pod_that_fetches_data_whatever_the_policy(phase: PodPhase, gone: bool) -> None:
    fetching = InitializerView("digits-init", "uid", phase)
    decided = look(make_job(missed_a_deadline(), cleanPodPolicy="None"), seen(initializer=fetching))
    assert deleted(decided) == (["digits-init"] if gone else [])


def test_an_edit_of_the_policy_takes_effect_after_the_end() -> None:
    assert deleted(look(make_job(OVER, cleanPodPolicy="All"), seen(ENDED))) == ["digits-0-1"]


# Time to live


@pytest.mark.parametrize(
    ("ttl", "seconds", "expected"),
    [
        pytest.param(None, 1e6, ((), None), id="without one a job stays"),
        pytest.param(60, 59.5, ((), 0.5), id="it stays until its time is up"),
        pytest.param(60, 60, ((DeleteJob(make_job().uid),), None), id="and goes at that moment"),
        pytest.param(0, 0, ((DeleteJob(make_job().uid),), None), id="none at all"),
    ],
)
def test_when_a_job_that_is_over_is_deleted(ttl: int | None, seconds: float, expected: tuple[object, object]) -> None:
    decided = look(make_job(OVER, ttlSecondsAfterFinished=ttl), seen(), seconds)
    assert (decided.actions, decided.requeue_after) == expected


def test_the_moment_is_known_from_the_look_that_ends_the_job() -> None:
    job = make_job(in_phase(Phase.RUNNING), ttlSecondsAfterFinished=60)
    assert look(job, seen(succeeded(0), succeeded(1))).requeue_after == 60
    assert look(job, seen(RUNS, failed(1, 64, "UserError"))).requeue_after == 60
    job = make_job(in_phase(Phase.RUNNING), ttlSecondsAfterFinished=0)
    assert look(job, seen(succeeded(0), succeeded(1))).requeue_after == 0


def test_a_job_that_is_not_over_is_never_deleted() -> None:
    status = in_phase(Phase.RUNNING, completion_time=later(-60))
    assert not [
        action
        for action in look(make_job(status, ttlSecondsAfterFinished=0), seen(make_pod(0), make_pod(1))).actions
        if isinstance(action, DeleteJob)
    ]


def test_a_job_that_is_being_deleted_is_not_deleted_again() -> None:
    assert look(make_job(OVER, deleting=True, ttlSecondsAfterFinished=0), seen()) == Plan(OVER)


def test_of_many_pods_whose_work_was_cut_off_few_are_named() -> None:
    said = json.dumps({"version": 1, "reason": "Completed", "cut": "rank 1: its processes upload (7)"})
    pods = [make_pod(rank, "Succeeded", termination=ended(0, said)) for rank in range(64)]
    status = look(make_job(in_phase(Phase.RUNNING, nodes=64), nodes=64), seen(*pods)).status
    (complete,) = (item for item in status.conditions if item.type == cond.COMPLETE)
    assert complete.message.count("rank 1: its processes upload (7)") == 3
    assert complete.message.endswith(" and 61 more")


def test_work_that_was_cut_off_after_the_script_is_named_in_the_success() -> None:
    said = json.dumps({"version": 1, "reason": "Completed", "cut": "rank 1: its processes upload (7)"})
    pods = [succeeded(0), replace(succeeded(1), termination=ended(0, said))]
    decided = look(make_job(in_phase(Phase.RUNNING)), seen(*pods))
    assert decided.status.phase is Phase.SUCCEEDED
    (event,) = decided.events
    assert event.type == "Warning"
    assert event.message.endswith("ended before it was done: digits-0-1: rank 1: its processes upload (7)")
