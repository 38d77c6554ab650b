"""A gang that cannot be completed holds nothing: when it gives back what it has, and when it tries again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import log2
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, heard, in_phase, later, make_job, make_pod, seen
from looks import at, created, deleted

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.budget import JITTER
from ddpjob_operator.core.manifests.spec_changes import digests
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.all_or_nothing import plan_release
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import AssignPod, DeletePod, Plan, SyncPod
from ddpjob_operator.core.values.job import NAME_TAKEN, Problem
from ddpjob_operator.core.values.names import pod_name
from ddpjob_operator.core.values.observed import Observed, PodView

QUOTA = Problem("QuotaExceeded", "the API server rejected Pod digits-0-2: exceeded quota: few")
DENIED = Problem("AdmissionDenied", "the API server rejected Pod digits-0-2: admission webhook: no")
SILENT = Problem("AdmissionFailed", "the API server rejected Pod digits-0-2: failed calling webhook")
LIMIT = {"scheduling": {"timeoutSeconds": 60}}
ELASTIC = {"elastic": {"minNodes": 2}}


def waiting(node_rank: int, **fields: Any) -> PodView:
    return replace(make_pod(node_rank, "Pending", **fields), node_name=None, message="0/3 nodes are available")


def placed(node_rank: int, **fields: Any) -> PodView:
    return make_pod(node_rank, "Pending", scheduled=True, **fields)


def decide(*pods: PodView, nodes: int = 4, problem: Problem | None = None, status: DDPJobStatus | None = None,
           **spec: Any) -> Plan | None:  # fmt: skip
    status = status or in_phase(Phase.STARTING, nodes=nodes, attempt_start_time=later(-100))
    job = make_job(status, nodes=nodes, **spec)
    observed = seen(*pods, problem=problem)
    return plan_release(at(job, observed))


@pytest.mark.parametrize(
    ("pods", "problem", "spec"),
    [
        pytest.param((waiting(0), waiting(1)), QUOTA, {}, id="a pod is refused and others were made"),
        pytest.param((placed(0), waiting(1)), QUOTA, {}, id="one of them has a node already"),
        pytest.param((waiting(0),), QUOTA, ELASTIC, id="fewer were made than an elastic gang can do with"),
        pytest.param((placed(0), *map(waiting, (1, 2, 3))), None, LIMIT, id="some have had a node for too long"),
        pytest.param((placed(0), waiting(1), waiting(2)), None, LIMIT, id="and the others are not even all there"),
        pytest.param((placed(0), *map(waiting, (1, 2, 3))), None, LIMIT | ELASTIC, id="too few for an elastic gang"),
        pytest.param((waiting(0),), SILENT, {}, id="a webhook has failed for long"),
    ],
)
def test_a_gang_is_given_back_when(pods: tuple[PodView, ...], problem: Problem | None, spec: dict[str, Any]) -> None:
    decided = decide(*pods, problem=problem, **spec)
    assert decided is not None
    assert [(action.name, action.uid) for action in decided.actions if isinstance(action, DeletePod)] == [
        (pod.name, pod.uid) for pod in pods
    ]
    assert len(decided.actions) == len(pods)
    assert decided.status_first


@pytest.mark.parametrize(
    ("pods", "problem", "spec"),
    [
        pytest.param((), QUOTA, {}, id="there is nothing to give back"),
        pytest.param(tuple(map(waiting, range(4))), QUOTA, {}, id="the gang is complete"),
        pytest.param((waiting(0), waiting(1)), None, {}, id="nothing was refused, and there is no limit"),
        pytest.param((waiting(0), waiting(1)), QUOTA, ELASTIC, id="an elastic gang can go on with what there is"),
        pytest.param((waiting(0), make_pod(1, attempt=-1, deleting=True)), QUOTA, {}, id="the last attempt still goes"),
        pytest.param(
            (waiting(0),),
            Problem(NAME_TAKEN, "digits-0-1 exists already"),
            {},
            id="the former pod is going",
        ),
        pytest.param((waiting(0), replace(waiting(1), deleting=True)), QUOTA, {}, id="somebody deletes a pod of it"),
        pytest.param(tuple(map(waiting, range(4))), None, LIMIT, id="no pod holds a node, but a place in a queue"),
        pytest.param(tuple(map(placed, range(4))), None, LIMIT, id="all have nodes and pull images"),
        pytest.param((placed(0), placed(1), waiting(2)), None, LIMIT | ELASTIC, id="an elastic gang has enough nodes"),
        pytest.param((placed(0), waiting(1)), None, {"scheduling": {"timeoutSeconds": 101}}, id="it is not late yet"),
        pytest.param(
            (waiting(0), make_pod(1, attempt=-1, deleting=True, gone_by=later(-2.9))),
            QUOTA,
            {},
            id="its end may be news",
        ),
    ],
)
def test_a_gang_is_left_alone_when(pods: tuple[PodView, ...], problem: Problem | None, spec: dict[str, Any]) -> None:
    assert decide(*pods, problem=problem, **spec) is None


def test_a_pod_of_the_last_attempt_whose_node_never_confirms_its_end_does_not_keep_the_gang() -> None:
    """Two gangs that both wait for their zombies would wait for each other for ever."""
    zombie = make_pod(1, attempt=-1, deleting=True, gone_by=later(-3))
    decided = decide(waiting(0), zombie, problem=QUOTA)
    assert decided is not None
    assert [action.name for action in decided.actions if isinstance(action, DeletePod)] == ["digits-0-0"]


@pytest.mark.parametrize(("asked", "released"), [(59.0, False), (60.0, True)])
def test_a_webhook_that_fails_releases_the_gang_only_when_it_goes_on(asked: float, released: bool) -> None:
    status = in_phase(Phase.STARTING, nodes=4, attempt_start_time=later(-asked))
    assert (decide(waiting(0), problem=SILENT, status=status) is not None) is released


@pytest.mark.parametrize("phase", [None, Phase.PENDING, Phase.RUNNING])
def test_only_a_gang_that_starts_is_given_back(phase: Phase | None) -> None:
    status = in_phase(Phase.STARTING, nodes=4, attempt_start_time=later(-100)).model_copy(update={"phase": phase})
    assert decide(placed(0), waiting(1), problem=QUOTA, status=status, **LIMIT) is None


def test_the_next_try_is_a_new_attempt_that_costs_nothing_and_says_what_it_waits_for() -> None:
    before = in_phase(Phase.RESTARTING, nodes=4, attempt=3, restarts=2, restarts_since_progress=1, kept_pods={"a": 0},
                      attempt_start_time=later(-100))  # fmt: skip
    decided = decide(placed(0, attempt=3), problem=QUOTA, status=before)
    assert decided is not None
    after = decided.status
    assert (after.phase, after.attempt, after.restarts, after.disruptions) == (Phase.RESTARTING, 4, 2, 0)
    assert (after.restarts_since_progress, after.internal.kept_pods) == (1, {})
    assert after.attempt_start_time == before.attempt_start_time, "the job has waited for its nodes since then"
    degraded = cond.find(after.conditions, cond.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "QuotaExceeded")
    assert degraded.message == (
        "1 of 4 pods were released: the API server rejected Pod digits-0-2: exceeded quota: few; retrying in 1 s"
    )
    assert [(event.type, event.reason) for event in decided.events] == [("Warning", "GangReleased")]


@pytest.mark.parametrize("name", ["digits", "digits.v2", "1-digits", "d" * 63])
def test_the_same_refusal_of_each_try_is_the_same_event(name: str) -> None:
    """Then it raises the count of the first one, where seven tries would make seven."""
    said = set()
    for attempt in range(2):
        words = f"the API server rejected Pod {pod_name(name, attempt, 2)}: exceeded quota: few"
        status = in_phase(Phase.STARTING, nodes=4, attempt=attempt)
        job = replace(make_job(status, nodes=4), name=name)
        decided = plan_release(at(job, seen(placed(0, attempt=attempt), problem=Problem("QuotaExceeded", words))))
        assert decided is not None
        said |= {event.message for event in decided.events}
        assert f"Pod {pod_name(name, attempt, 2)}" in str(decided.status.conditions)
    kept = pod_name(name, 0, 2).replace("-0-2", "-*-2")
    assert said == {f"1 of 4 pods were released: the API server rejected Pod {kept}: exceeded quota: few"}


def test_a_gang_whose_spec_was_edited_is_tried_again_with_the_size_of_that() -> None:
    """Servers without CEL take such an edit. Its digests with another size would hide it for good."""
    status = in_phase(Phase.STARTING, nodes=4, attempt_start_time=later(-100))
    decided = plan(make_job(status, nodes=2, **LIMIT), seen(placed(0), *map(waiting, (1, 2, 3))), NOW, DEFAULTS)
    after = decided.status
    assert (after.attempt, after.nodes.total) == (1, 2)
    assert [event.message for event in decided.events] == [
        "4 of 4 pods were released: after 60 s 1 of 4 pods had a node: pod digits-*-1: 0/3 nodes are available"
    ]


def test_a_late_gang_says_why_in_the_words_of_the_scheduler() -> None:
    decided = decide(placed(0), waiting(1), **LIMIT)
    assert decided is not None
    degraded = cond.find(decided.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert degraded.reason == "GangTimeout"
    assert "after 60 s 1 of 4 pods had a node: pod digits-0-1: 0/3 nodes are available; retrying" in degraded.message


@pytest.mark.parametrize(
    ("problem", "backoff", "longest"),
    [
        pytest.param(DENIED, {}, 300, id="as after failures"),
        pytest.param(QUOTA, {}, 60, id="room may come at any time"),
        pytest.param(QUOTA, {"maxSeconds": 10}, 10, id="who wants shorter waits has them"),
        pytest.param(DENIED, {"maxSeconds": 3600}, 3600, id="and longer ones"),
        pytest.param(QUOTA, {"maxSeconds": 3600}, 60, id="but not for a quota"),
    ],
)
def test_each_wait_is_longer_than_the_one_before_up_to_the_longest(
    problem: Problem, backoff: dict[str, int], longest: int
) -> None:
    waits = []
    status = in_phase(Phase.STARTING, nodes=4)
    for attempt in range(16):
        decided = decide(waiting(0, attempt=attempt), problem=problem, status=status, restart={"backoff": backoff})
        assert decided is not None
        assert decided.requeue_after is not None
        assert decided.status.retry_at == later(decided.requeue_after)
        waits.append(decided.requeue_after)
        status = decided.status
    growing = int(log2(longest)) + 1
    assert waits[:growing] == sorted(waits[:growing])
    assert all(longest * (1 - JITTER) <= wait <= longest for wait in waits[growing:])


def test_a_job_without_backoff_still_waits_a_moment() -> None:
    decided = decide(waiting(0), problem=QUOTA, restart={"backoff": {"initialSeconds": 0, "maxSeconds": 0}})
    assert decided is not None
    assert decided.requeue_after == 1


@pytest.mark.parametrize(("seconds", "asks"), [(-1, True), (20, False), (99999, True)])
def test_it_asks_again_when_the_wait_is_over_or_the_clock_was_set_back(seconds: float, asks: bool) -> None:
    status = in_phase(Phase.STARTING, nodes=4, attempt=1, retry_at=later(seconds))
    decided = plan(make_job(status, nodes=4), Observed(service=seen(attempt=1).service, pvc_exists=True), NOW, DEFAULTS)
    assert bool(decided.actions) is asks
    assert asks or decided.requeue_after == pytest.approx(seconds)


def test_the_time_of_one_try_begins_when_it_asks() -> None:
    status = in_phase(Phase.STARTING, nodes=4, attempt_start_time=later(-1000), retry_at=later(-59))
    assert decide(placed(0), waiting(1), status=status, **LIMIT) is None
    assert decide(placed(0), waiting(1), status=status.model_copy(update={"retry_at": later(-60)}), **LIMIT) is not None


# Ranks that give up waiting


def gave_up(node_rank: int) -> PodView:
    return failed(node_rank, 1, "RendezvousFailed")


STARTED: dict[str, Any] = {"attempt_start_time": later(-700), "restarts": 10, "restarts_since_progress": 10}


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTARTING])
@pytest.mark.parametrize("late", [(waiting(2),), ()], ids=["it waits for a node", "it is not even there"])
def test_a_gang_that_never_was_complete_costs_no_restart(phase: Phase, late: tuple[PodView, ...]) -> None:
    """Ranks wait ten minutes for each other. On a full cluster the whole budget was used up in two hours."""
    status = in_phase(phase, nodes=3, **STARTED)
    decided = plan(make_job(status, nodes=3), seen(gave_up(0), gave_up(1), *late), NOW, DEFAULTS)
    after = decided.status
    assert (after.phase, after.attempt, after.restarts, after.restarts_since_progress) == (phase, 1, 10, 10)
    assert (after.disruptions, after.disruptions_since_progress, after.last_failure) == (0, 1, None)
    assert after.attempt_start_time == later(-700), "its startup deadline goes on"
    assert decided.status_first
    assert deleted(decided) == ["digits-0-0", "digits-0-1", *(pod.name for pod in late)]
    degraded = cond.find(after.conditions, cond.DEGRADED)
    assert degraded is not None
    assert degraded.reason == "GangTimeout"
    why = ": pod digits-0-2: 0/3 nodes are available" if late else ""
    assert degraded.message.startswith(f"ranks gave up waiting for 1 of 3 pods{why}; retrying in ")
    assert [(event.type, event.reason) for event in decided.events] == [("Warning", "Restarting")]


def test_a_gang_that_never_was_complete_is_tried_again_with_the_size_of_an_edited_spec() -> None:
    status = in_phase(Phase.STARTING, nodes=3, **STARTED)
    decided = plan(make_job(status, nodes=2), seen(gave_up(0), gave_up(1), waiting(2)), NOW, DEFAULTS)
    assert (decided.status.attempt, decided.status.restarts, decided.status.nodes.total) == (1, 10, 2)


@pytest.mark.parametrize(
    ("pods", "rules", "begun"),
    [
        pytest.param((gave_up(0), gave_up(1), make_pod(2)), [], 700, id="all pods run"),
        pytest.param((failed(0, 1, "WorkerException"), gave_up(1), waiting(2)), [], 700, id="one failed for a reason"),
        pytest.param((gave_up(0), gave_up(1), waiting(2)), [{"action": "Restart"}], 700, id="a rule says so"),
        pytest.param((failed(0, 1, "PeerLost"), waiting(1), waiting(2)), [], 299, id="a script lost a connection soon"),
    ],
)
def test_any_other_end_of_a_gang_that_starts_counts(
    pods: tuple[PodView, ...], rules: list[dict[str, Any]], begun: float
) -> None:
    status = in_phase(Phase.STARTING, nodes=3, attempt_start_time=later(-begun))
    after = plan(make_job(status, nodes=3, restart={"rules": rules}), seen(*pods), NOW, DEFAULTS).status
    assert (after.attempt, after.restarts) == (1, 1)


@pytest.mark.parametrize(
    ("late", "least", "size"),
    [
        pytest.param(waiting(2), 2, 2, id="two nodes are enough"),
        pytest.param(waiting(2), 3, 3, id="two nodes are too few"),
        pytest.param(placed(2), 2, 3, id="all have nodes, and one pulls its image"),
    ],
)
def test_an_elastic_gang_that_waits_for_longer_than_its_ranks_goes_on_with_what_it_has(
    late: PodView, least: int, size: int
) -> None:
    """It would never shrink: `waitSeconds` begin anew with each try."""
    spec: dict[str, Any] = {"nodes": 3, "elastic": {"minNodes": least, "waitSeconds": 3600}}
    status = in_phase(Phase.STARTING, nodes=3, spec=spec, **STARTED)
    after = plan(make_job(status, **spec), seen(gave_up(0), gave_up(1), late), NOW, DEFAULTS).status
    assert (after.attempt, after.restarts, after.disruptions, after.nodes.total) == (1, 10, 0, size)
    degraded = cond.find(after.conditions, cond.DEGRADED)
    assert degraded is not None
    assert ("; retrying with 2 nodes in " in degraded.message) is (size < 3)


IN_PLACE: dict[str, Any] = {"nodes": 3, "restart": {"scope": "InPlace"}}


def stranded(*pods: PodView, tries: int = 0, **internal: Any) -> Plan:
    """What is decided about attempt 1 of a gang of which node rank 0 says that its ranks gave up, after `tries`."""
    made_from = digests(make_job(**IN_PLACE), DEFAULTS)
    status = in_phase(
        Phase.RESTARTING,
        nodes=3,
        attempt=1,
        spec_digests=made_from,
        disruptions_since_progress=tries,
        **STARTED,
        **internal,
    )
    report = heard(attempt=1, phase="waiting", phaseSeconds=60.0)
    return plan(make_job(status, **IN_PLACE), seen(*pods, attempt=1, report=report), NOW, DEFAULTS)


@pytest.mark.parametrize(
    ("late", "tries", "kept"),
    [
        pytest.param(waiting(2, attempt=1), 1, [0, 1], id="there may be a node soon"),
        pytest.param(waiting(2, attempt=1), 2, [], id="there was none in two tries"),
        pytest.param(placed(2, attempt=1), 2, [0, 1, 2], id="all have nodes, and one pulls its image"),
    ],
)
def test_a_gang_keeps_its_nodes_from_others_for_two_tries_at_most(late: PodView, tries: int, kept: list[int]) -> None:
    """Two gangs that each hold half of what there is would wait for each other for ever."""
    decided = stranded(make_pod(0, attempt=1), make_pod(1, attempt=1), late, tries=tries)
    assert (decided.status.attempt, decided.status.restarts) == (2, 10)
    assert sorted(decided.status.internal.kept_pods.values()) == kept
    assert deleted(decided) == [f"digits-1-{rank}" for rank in range(3) if rank not in kept]


def test_pods_that_were_never_assigned_do_not_keep_a_gang_from_being_given_back() -> None:
    """As where a policy refuses the labels of their new places: new pods have them from the start."""
    kept = {"digits-0-0": 0, "digits-0-1": 1}
    decided = stranded(make_pod(0), make_pod(1), make_pod(2, attempt=1), tries=2, kept_pods=kept)
    assert decided.status.internal.kept_pods == {}
    assert deleted(decided) == ["digits-0-0", "digits-0-1", "digits-1-2"]


REFUSED = Problem("AdmissionFailed", "a policy refuses labels")


@pytest.mark.parametrize(
    ("pods", "problem", "released"),
    [
        pytest.param((placed(2, attempt=1),), None, False, id="all have nodes"),
        pytest.param((waiting(2, attempt=1),), None, True, id="one has none"),
        pytest.param((placed(2, attempt=1),), REFUSED, True, id="they will not be assigned"),
    ],
)
def test_kept_pods_that_have_yet_to_be_assigned_have_nodes(
    pods: tuple[PodView, ...], problem: Problem | None, released: bool
) -> None:
    """The operator wrote which pods it keeps, and was away until the time was up."""
    kept = {"digits-0-0": 0, "digits-0-1": 1}
    status = in_phase(Phase.RESTARTING, nodes=3, attempt=1, attempt_start_time=later(-100), kept_pods=kept)
    joined = replace(make_pod(0), attempt=1)
    decided = decide(joined, make_pod(1), *pods, nodes=3, problem=problem, status=status, **LIMIT)
    assert (decided is not None) is released
    if decided is not None:
        why = "" if problem else ": pod digits-*-2: 0/3 nodes are available"
        assert decided.events[0].message.endswith(f"after 60 s 2 of 3 pods had a node{why}")


def test_pods_that_can_be_kept_stay_while_the_gang_is_tried_again() -> None:
    pods = (make_pod(0, attempt=1), make_pod(1, attempt=1))
    decided = stranded(*pods, waiting(2, attempt=1))
    after = decided.status
    assert (after.attempt, after.restarts, after.internal.kept_pods) == (2, 10, {"digits-1-0": 0, "digits-1-1": 1})
    assert deleted(decided) == ["digits-1-2"]
    again = plan(make_job(after, **IN_PLACE), seen(*pods, attempt=1), later(400), DEFAULTS)
    assigned = [(action.name, action.node_rank) for action in again.actions if isinstance(action, AssignPod)]
    assert assigned == [("digits-1-0", 0), ("digits-1-1", 1)]
    assert created(again) == ["digits-2-2"]
    assert after.retry_at is not None
    joined = tuple(replace(pod, attempt=2) for pod in pods)
    observed = seen(*joined, waiting(2, attempt=2), attempt=2)
    shown = plan(make_job(after, **IN_PLACE), observed, after.retry_at + timedelta(seconds=4), DEFAULTS)
    synced = [(action.name, action.sync) for action in shown.actions if isinstance(action, SyncPod)]
    assert synced == [("digits-1-0", "2-1"), ("digits-1-1", "2-1")], "kubelets may not have shown them their places"
