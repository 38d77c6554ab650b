"""Why a gang that should be starting does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, NOW, in_phase, later, make_job, make_pod, seen
from looks import at

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.gang.problems import (
    HINTS,
    NOT_SCHEDULED,
    startup_problem,
    until_startup_problem,
    with_scheduled,
)
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import PodView

FRESH = in_phase(Phase.STARTING, start_time=later(-2.9))
LASTING = in_phase(Phase.STARTING, start_time=later(-3))
NO_IMAGE = make_pod(1, "Pending", reason="ErrImagePull", message="not found")


def restarting(seconds_ago: float) -> DDPJobStatus:
    return in_phase(Phase.RESTARTING, attempt_start_time=later(-seconds_ago))


def backed_off(seconds_ago: float) -> DDPJobStatus:
    return in_phase(Phase.RESTARTING, attempt_start_time=later(-60), restart_at=later(-seconds_ago))


def waiting(reason: str, message: str, node_rank: int = 0) -> PodView:
    return make_pod(node_rank, "Pending", reason=reason, message=message)


def nowhere(node_rank: int = 0, **fields: Any) -> PodView:
    return replace(make_pod(node_rank, "Pending", **fields), node_name=None)


def degraded(found: Problem, status: DDPJobStatus = LASTING) -> DDPJobStatus:
    """The status once `found` has been written."""
    said = cond.set_condition(status.conditions, cond.Update(cond.DEGRADED, True, found.reason, found.message), NOW, 1)
    return status.model_copy(update={"conditions": said})


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
        pytest.param(backed_off(2.9), [NO_IMAGE], None, id="and begins when the wait before it is over"),
        pytest.param(backed_off(3), [NO_IMAGE], "ErrImagePull", id="and ends then too"),
        pytest.param(restarting(29.9), [nowhere()], None, id="a scheduler may take its time"),
        pytest.param(restarting(30), [nowhere()], "NotScheduled", id="but one that says nothing at all is not there"),
        pytest.param(restarting(30), [make_pod(0, "Pending")], None, id="a pod with a node has met its scheduler"),
        pytest.param(restarting(30), [nowhere(scheduled=True)], None, id="or with the condition that says so"),
        pytest.param(DDPJobStatus(), [NO_IMAGE], None, id="before the job was begun there is no trouble"),
    ],
)  # fmt: skip
def test_trouble_is_a_reason_that_lasts(status: DDPJobStatus, pods: list[PodView], reason: str | None) -> None:
    found = startup_problem(at(make_job(status)), tuple(pods))
    assert (found.reason if found else None) == reason


@pytest.mark.parametrize(
    ("before", "pods", "said"),
    [
        pytest.param(LASTING, [make_pod(0), NO_IMAGE], ["ErrImagePull: pod digits-0-1: not found"], id="news"),
        pytest.param(degraded(Problem("ErrImagePull", "pod digits-0-0: not found")), [make_pod(0), NO_IMAGE], [],
                     id="the same of another pod"),
        pytest.param(degraded(Problem("Unschedulable", "0/2 nodes")), [make_pod(0), NO_IMAGE],
                     ["ErrImagePull: pod digits-0-1: not found"], id="another reason"),
        pytest.param(LASTING, [make_pod(0), make_pod(1)], [], id="nothing is wrong"),
    ],
)  # fmt: skip
def test_each_reason_for_which_a_job_is_degraded_is_one_event(
    before: DDPJobStatus, pods: list[PodView], said: list[str]
) -> None:
    decided = plan(make_job(before), seen(*pods), NOW, DEFAULTS)
    found = [event for event in decided.events if event.reason == "Degraded"]
    assert [event.message.partition(". The image")[0] for event in found] == said
    assert all(event.type == "Warning" for event in found)


def test_a_gang_that_is_released_is_one_event_and_not_two() -> None:
    refused = seen(make_pod(0, "Pending"), problem=Problem("QuotaExceeded", "exceeded quota"))
    decided = plan(make_job(LASTING), refused, NOW, DEFAULTS)
    assert [event.reason for event in decided.events] == ["GangReleased"]
    assert any(item.type == "Degraded" and item.status == "True" for item in decided.status.conditions)


def test_what_the_api_server_refused_is_said_at_once() -> None:
    found = startup_problem(at(make_job(FRESH), seen(problem=Problem("QuotaExceeded", "exceeded quota"))), ())
    assert found is not None
    assert found.reason == "QuotaExceeded"
    assert found.message.startswith("exceeded quota. Raise the namespace's ResourceQuota")


TROUBLE = [
    (
        "Unschedulable",
        'persistentvolumeclaim "mine" not found',
        "If spec.shared.claimName names it, create it or correct the name.",
    ),
    (
        "Unschedulable",
        'persistentvolumeclaim "digits-shared" not found',
        "A claim of the operator's is created again.",
    ),
    ("Unschedulable", "pod has unbound immediate PersistentVolumeClaims", "StorageClass"),
    ("Unschedulable", "pod has unbound immediate PersistentVolumeClaims", "delete the claim along with the job"),
    (
        "SchedulerError",
        'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded',
        "kubectl describe pvc",
    ),
    (
        "Unschedulable",
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't find available persistent "
        "volumes to bind.",
        "kubectl describe pvc",
    ),
    ("Unschedulable", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "elastic"),
    ("Unschedulable", "0/2 nodes are available: 2 node(s) had untolerated taint {a: b}.", "toleration"),
    ("Unschedulable", "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", "No node"),
    ("CreateContainerConfigError", 'secret "token" not found', "Create it in the job's namespace"),
    ("CreateContainerConfigError", 'configmap "code" not found', "Create it in the job's namespace"),
    ("CreateContainerConfigError", "couldn't find key a in Secret b/c", "Add the key"),
    ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "non-root"),
    (
        "FailedAttachVolume",
        'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) digits-0-0',
        "out-of-service",
    ),
    ("FailedAttachVolume", 'AttachVolume.Attach failed for volume "pvc-1" : timed out', "CSI driver"),
    ("InvalidImageName", "couldn't parse image reference", "Correct the image name"),
    ("ErrImageNeverPull", "Container image is not present with pull policy of Never", "load it"),
    ("AdmissionDenied", 'admission webhook "a" denied the request: no', "policy"),
    (
        "AdmissionDenied",
        'admission webhook "vault.hashicorp.com" denied the request: error creating new agent sidecar: failed to '
        "find service account volume mount",
        "automountServiceAccountToken: true",
    ),
    ("AdmissionFailed", 'failed calling webhook "a": connection refused', "webhook does not respond"),
    ("Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', "securityContext"),
    (
        "Forbidden",
        'pods "x" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities (container '
        '"istio-init" must not include "NET_ADMIN", "NET_RAW" in securityContext.capabilities.add)',
        "keep the pods out of the mesh",
    ),
    ("Forbidden", "pods is forbidden: no PriorityClass with name high was found", "priorityClassName"),
    ("Forbidden", "maximum memory usage per Container is 1Gi, but limit is 8Gi", "LimitRange"),
    ("Forbidden", "memory max limit to request ratio per Container is 2, but provided ratio is 4.0", "LimitRange"),
    ("Invalid", 'Invalid value: "900Mi": must be less than or equal to memory limit of 512Mi', "LimitRange"),
    ("Forbidden", 'error looking up service account a/b: serviceaccount "b" not found', "serviceAccountName"),
    ("FailedMount", 'MountVolume.SetUp failed for volume "code" : configmap "code" not found', "correct the name"),
    ("FailedMount", "mount.nfs: Connection timed out", "storage server responds"),
    ("FailedCreatePodSandBox", 'plugin type="calico" failed (add): connection refused', "network plugin"),
    ("QuotaExceeded", "exceeded quota: gpus, requested: 8, used: 0, limited: 4", "ResourceQuota"),
    ("TooLarge", "etcdserver: request is too large", "Shorten args"),
    (NOT_SCHEDULED, "no scheduler has said anything about it", "schedulerName"),
]


@pytest.mark.parametrize(("reason", "said", "hint"), TROUBLE)
def test_trouble_says_what_to_do_about_it(reason: str, said: str, hint: str) -> None:
    of_pod = startup_problem(at(make_job(LASTING)), (waiting(reason, said),))
    of_server = startup_problem(at(make_job(LASTING), seen(problem=Problem(reason, said))), ())
    for found in (of_pod, of_server):
        assert found is not None
        assert found.reason == reason
        assert said.rstrip(".") in found.message
        assert hint in found.message.partition(said.rstrip("."))[2]


def test_every_hint_is_the_first_to_match_some_words() -> None:
    shown = [
        next((row for row in HINTS if row[0] == reason and re.search(row[1], said, re.IGNORECASE)), None)
        for reason, said, _ in TROUBLE
    ]
    assert [row for row in HINTS if row not in shown] == []


@pytest.mark.parametrize(("shared", "claim"), [({}, "digits-shared"), ({"claimName": "mine"}, "mine")])
def test_a_pod_that_nobody_schedules_is_named_with_the_claim_that_a_scheduler_may_wait_for(
    shared: dict[str, str], claim: str
) -> None:
    """A scheduler that waits for a volume at the node that it has chosen sets no condition."""
    found = startup_problem(at(make_job(restarting(30), shared=shared)), (nowhere(1),))
    assert found is not None
    said = f"pod digits-0-1: no scheduler has said anything about it; its claim is {claim}. As long as the claim is not"
    assert found.message.startswith(said)


def test_the_pod_that_does_not_fit_is_named_and_not_those_that_the_scheduler_holds_back_for_it() -> None:
    full = waiting("Unschedulable", "0/9 nodes are available: 9 Insufficient nvidia.com/gpu.")
    found = startup_problem(at(make_job(restarting(30))), (nowhere(0), nowhere(1), full))
    assert found is not None
    assert found.reason == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in found.message


@pytest.mark.parametrize(("age", "named"), [(29.0, False), (30.0, True)])
def test_a_pod_that_was_created_late_in_an_attempt_has_as_long_to_be_scheduled(age: float, named: bool) -> None:
    late = nowhere(1, created=later(-age))
    scene = at(make_job(restarting(600)), seen(make_pod(0), late))
    assert (startup_problem(scene, (late,)) is not None) is named
    assert until_startup_problem(scene) == (None if named else 1.0)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        pytest.param("0/7 nodes are available: 7 busy", "0/8 nodes are available: 8 busy", True, id="only numbers"),
        pytest.param("0/7 nodes are available: 7 busy", "0/7 nodes are available: 7 tainted", False, id="other words"),
    ],
)
def test_words_that_only_count_differently_are_said_once(first: str, second: str, same: bool) -> None:
    known = startup_problem(at(make_job(LASTING)), (waiting("Unschedulable", first),))
    assert known is not None
    after = startup_problem(at(make_job(degraded(known))), (waiting("Unschedulable", second),))
    assert (after == known) is same


def test_the_same_trouble_of_another_pod_is_news() -> None:
    known = startup_problem(at(make_job(LASTING)), (waiting("Unschedulable", "full", 0),))
    assert known is not None
    after = startup_problem(at(make_job(degraded(known))), (waiting("Unschedulable", "full", 1),))
    assert after is not None
    assert after.message.startswith("pod digits-0-1: ")


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (restarting(0), 3.0),
        (restarting(2), 1.0),
        (restarting(3), 27.0),
        (restarting(30), None),
        (backed_off(-10), 13.0),
        (DDPJobStatus(), 3.0),
    ],
)
def test_a_gang_that_waits_is_looked_at_when_its_wait_becomes_trouble(
    status: DDPJobStatus, seconds: float | None
) -> None:
    assert until_startup_problem(at(make_job(status))) == seconds


# The condition Scheduled

UNSCHEDULABLE = Problem("Unschedulable", "pod digits-0-0: full")
HELD = Problem("SchedulingGated", "pod digits-0-0: Scheduling is blocked due to non-empty scheduling gates")


def scheduled(status: DDPJobStatus, pods: tuple[PodView, ...], trouble: Problem | None) -> tuple[str, str] | None:
    after = with_scheduled(at(make_job(status)), pods, trouble).status
    found = cond.find(after.conditions, cond.SCHEDULED)
    return (found.status, found.reason) if found else None


def held(status: DDPJobStatus = LASTING) -> DDPJobStatus:
    return with_scheduled(at(make_job(status)), (nowhere(0), nowhere(1)), HELD).status


@pytest.mark.parametrize(
    ("status", "pods", "trouble", "expected"),
    [
        pytest.param(LASTING, (make_pod(0), make_pod(1)), None, None, id="a happy gang costs no word"),
        pytest.param(LASTING, (nowhere(0), nowhere(1)), None, None, id="nor does one that waits in peace"),
        pytest.param(LASTING, (nowhere(0), make_pod(1)), UNSCHEDULABLE, ("False", "Unschedulable"), id="no node"),
        pytest.param(LASTING, (make_pod(0),), Problem("QuotaExceeded", ""), ("False", "QuotaExceeded"), id="no pod"),
        pytest.param(LASTING, (make_pod(0), NO_IMAGE), Problem("ErrImagePull", ""), ("True", "AllScheduled"),
                     id="trouble that comes after"),
        pytest.param(LASTING, (nowhere(0), nowhere(1)), HELD, ("False", "SchedulingGated"), id="held by a queue"),
        pytest.param(held(), (make_pod(0), make_pod(1)), None, ("True", "AllScheduled"), id="let go and placed"),
        pytest.param(held(), (nowhere(0), nowhere(1)), None, ("False", "Scheduling"), id="let go"),
        pytest.param(held(degraded(UNSCHEDULABLE)), (make_pod(0), make_pod(1)), None, ("True", "AllScheduled"),
                     id="trouble that is over"),
    ],
)  # fmt: skip
def test_whether_the_gang_has_its_nodes(
    status: DDPJobStatus, pods: tuple[PodView, ...], trouble: Problem | None, expected: tuple[str, str] | None
) -> None:
    assert scheduled(status, pods, trouble) == expected


def test_a_gang_that_a_queue_holds_is_not_degraded_but_says_what_it_waits_for() -> None:
    gated = tuple(nowhere(rank, reason=HELD.reason, message="gates") for rank in (0, 1))
    after = plan(make_job(LASTING), seen(*gated), NOW, DEFAULTS).status
    assert not cond.holds(after.conditions, cond.DEGRADED)
    found = cond.find(after.conditions, cond.SCHEDULED)
    assert found is not None
    assert (found.status, found.reason) == ("False", "SchedulingGated")


def test_a_gang_that_runs_has_its_nodes_and_the_next_attempt_has_not_yet() -> None:
    running = plan(make_job(LASTING), seen(make_pod(0), make_pod(1)), NOW, DEFAULTS).status
    assert cond.holds(running.conditions, cond.SCHEDULED)
    again = plan(make_job(running), seen(make_pod(0)), NOW, DEFAULTS).status
    assert again.attempt == 1
    assert not cond.holds(again.conditions, cond.SCHEDULED)


def test_trouble_names_the_pod_the_words_of_the_kubelet_and_what_to_do() -> None:
    found = startup_problem(at(make_job(LASTING)), (NO_IMAGE,))
    assert found is not None
    assert found.message.startswith("pod digits-0-1: not found. The image cannot be pulled: check")


@pytest.mark.parametrize("reason", ["ErrImagePull", "RegistryUnavailable", "SignatureValidationFailed"])
def test_an_image_that_cannot_be_pulled_is_one_write_however_often_the_kubelet_tries(reason: str) -> None:
    back_off = make_pod(1, "Pending", reason="ImagePullBackOff", message="Back-off pulling image")
    status, written = LASTING, set()
    for pod in (replace(NO_IMAGE, reason=reason), back_off) * 5:
        found = startup_problem(at(make_job(status)), (pod,))
        assert found is not None
        status = degraded(found, status)
        written.add(f"{found.reason}: {found.message}")
    assert [said.partition(":")[0] for said in written] == ["ErrImagePull"]


def test_trouble_that_was_said_is_not_taken_back_by_a_clock_that_is_set_back() -> None:
    status = degraded(Problem("ErrImagePull", "x"))
    assert startup_problem(at(make_job(status), seconds=-3600), (NO_IMAGE,)) is not None
