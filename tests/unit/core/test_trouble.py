"""Why a gang that should be starting does not."""

from __future__ import annotations

import pytest
from builders import NOW, in_phase, later, make_pod

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.model import PodView, Problem
from ddpjob_operator.core.trouble import find_trouble

FRESH = in_phase(Phase.STARTING, start_time=later(-2.9))
LASTING = in_phase(Phase.STARTING, start_time=later(-3))
NO_IMAGE = make_pod(1, "Pending", reason="ErrImagePull", message="not found")


def restarting(seconds_ago: float) -> DDPJobStatus:
    said = cond.set_condition((), cond.RESTARTING, True, "WorkerKilled", "", now=later(-seconds_ago), generation=1)
    return in_phase(Phase.RESTARTING, conditions=said)


@pytest.mark.parametrize(
    ("status", "pods", "reason"),
    [
        pytest.param(LASTING, [make_pod(0)], None, id="a pod that runs is no trouble"),
        pytest.param(LASTING, [make_pod(0, "Pending")], None, id="a pod that waits for nothing in particular is none"),
        pytest.param(LASTING, [make_pod(0), NO_IMAGE], "ErrImagePull", id="a pod without an image is trouble"),
        pytest.param(LASTING, [make_pod(0, "Pending", reason="ImagePullBackOff")], "ErrImagePull",
                     id="the kubelet's two words for one trouble are one"),
        pytest.param(FRESH, [NO_IMAGE], None, id="trouble of less than three seconds is not worth a write"),
        pytest.param(restarting(2.9), [NO_IMAGE], None, id="the grace begins anew with each restart"),
        pytest.param(restarting(3), [NO_IMAGE], "ErrImagePull", id="the grace after a restart ends"),
        pytest.param(DDPJobStatus(), [NO_IMAGE], None, id="before the job was begun there is no trouble"),
    ],
)  # fmt: skip
def test_trouble_is_a_reason_that_lasts(status: DDPJobStatus, pods: list[PodView], reason: str | None) -> None:
    found = find_trouble(status, tuple(pods), None, NOW)
    assert (found.reason if found else None) == reason


def test_what_the_api_server_refused_is_said_at_once() -> None:
    refused = Problem("QuotaExceeded", "exceeded quota")
    assert find_trouble(FRESH, (), refused, NOW) == refused


def test_trouble_names_the_pod_the_words_of_the_kubelet_and_what_to_do() -> None:
    found = find_trouble(LASTING, (NO_IMAGE,), None, NOW)
    assert found is not None
    assert found.message.startswith("pod digits-0-1: not found. The image cannot be pulled: check")


def test_an_image_that_cannot_be_pulled_is_one_write_however_often_the_kubelet_tries() -> None:
    back_off = make_pod(1, "Pending", reason="ImagePullBackOff", message="Back-off pulling image")
    status, written = LASTING, set()
    for pod in (NO_IMAGE, back_off) * 5:
        found = find_trouble(status, (pod,), None, NOW)
        assert found is not None
        said = cond.set_condition(
            status.conditions, cond.DEGRADED, True, found.reason, found.message, now=NOW, generation=1
        )
        status = status.model_copy(update={"conditions": said})
        written.add(found.message)
    assert len(written) == 1


def test_trouble_that_was_said_is_not_taken_back_by_a_clock_that_is_set_back() -> None:
    said = cond.set_condition((), cond.DEGRADED, True, "ErrImagePull", "x", now=NOW, generation=1)
    status = LASTING.model_copy(update={"conditions": said})
    assert find_trouble(status, (NO_IMAGE,), None, later(-3600)) is not None
