"""Pods that wait without a word: when their events are looked into, and what becomes of what is found there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, in_phase, later, make_job, make_pod, seen
from looks import at

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.gang.problems import until_warnings_are_read, warnings_to_read
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import ReadWarnings
from ddpjob_operator.core.values.observed import PodView, PodWarning

MUTE = make_pod(1, "Pending", scheduled=True)
ASKED = (ReadWarnings("digits-0-1", "pod-0-1"),)
FOUND = PodWarning(NOW, "FailedMount", 'MountVolume.SetUp failed for volume "token": secret "token" not found')


def starting(ago: float, phase: Phase = Phase.STARTING, **fields: Any) -> DDPJobStatus:
    return in_phase(phase, attempt_start_time=later(-ago), **fields)


def read(ago: float) -> dict[str, PodWarning]:
    return {"pod-0-1": PodWarning(later(-ago))}


@pytest.mark.parametrize(
    ("status", "pods", "warnings", "asked", "wait"),
    [
        pytest.param(starting(2), (make_pod(0), MUTE), {}, (), 1.0, id="a container may take its time"),
        pytest.param(starting(3), (make_pod(0), MUTE), {}, ASKED, None, id="for three seconds"),
        pytest.param(starting(3), (make_pod(0), make_pod(1)), {}, (), None, id="pods that run"),
        pytest.param(starting(3), (replace(MUTE, reason="ErrImagePull"),), {}, (), None, id="a pod that says why"),
        pytest.param(starting(3), (replace(MUTE, node_name=None, scheduled=False),), {}, (), None, id="no node yet"),
        pytest.param(starting(3), (replace(MUTE, deleting=True),), {}, (), None, id="a pod that goes"),
        pytest.param(starting(60, Phase.RUNNING), (MUTE,), {}, (), None, id="a gang that runs"),
        pytest.param(starting(60, restart_at=later(-2)), (MUTE,), {}, (), 1.0, id="the wait before a restart"),
        pytest.param(starting(4), (MUTE,), read(1), (), 4.0, id="nothing was found: again after five seconds"),
        pytest.param(starting(8), (MUTE,), read(5), ASKED, None, id="which are over"),
        pytest.param(starting(40), (MUTE,), read(20), ASKED, None, id="then after twice the time"),
        pytest.param(starting(40), (MUTE,), read(19), (), 2.0, id="each time"),
        pytest.param(starting(4000), (MUTE,), read(60), ASKED, None, id="but at least once a minute"),
        pytest.param(starting(4), (make_pod(0, "Pending"), MUTE), {}, (ReadWarnings("digits-0-0", "pod-0-0"),), None,
                     id="one pod is enough"),
    ],
)  # fmt: skip
def test_when_the_events_of_a_pod_are_looked_into(
    status: DDPJobStatus,
    pods: tuple[PodView, ...],
    warnings: dict[str, PodWarning],
    asked: tuple[ReadWarnings, ...],
    wait: float | None,
) -> None:
    seen_so_far = at(make_job(status), seen(*pods, warnings=warnings))
    assert warnings_to_read(seen_so_far, pods) == asked
    assert until_warnings_are_read(seen_so_far, pods) == wait


def test_the_plan_looks_at_the_moment_and_says_what_was_found() -> None:
    job = make_job(starting(2))
    assert plan(job, seen(make_pod(0), MUTE), NOW, DEFAULTS).requeue_after == 1.0
    assert plan(job, seen(make_pod(0), MUTE), later(1), DEFAULTS).actions == ASKED
    decided = plan(job, seen(make_pod(0), MUTE, warnings={MUTE.uid: FOUND}), later(1), DEFAULTS)
    assert decided.actions == ()
    degraded = cond.find(decided.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "FailedMount")
    assert degraded.message.startswith(f"pod digits-0-1: {FOUND.message}. Create it in the job's namespace")
    assert cond.holds(decided.status.conditions, cond.SCHEDULED)


def test_what_a_pod_says_itself_goes_before_its_events() -> None:
    pod = replace(MUTE, reason="ErrImagePull", message="not found")
    decided = plan(make_job(starting(9)), seen(make_pod(0), pod, warnings={pod.uid: FOUND}), NOW, DEFAULTS)
    degraded = cond.find(decided.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert degraded.reason == "ErrImagePull"


def test_trouble_that_the_events_no_longer_tell_of_is_taken_back() -> None:
    job = make_job(starting(9))
    said = plan(job, seen(make_pod(0), MUTE, warnings={MUTE.uid: FOUND}), NOW, DEFAULTS).status
    after = plan(make_job(said), seen(make_pod(0), MUTE, warnings={MUTE.uid: PodWarning(later(9))}), later(9), DEFAULTS)
    assert not cond.holds(after.status.conditions, cond.DEGRADED)
