"""The picture of the cluster: which of two versions counts, and what is gone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.cluster.lists import take_lists

from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.children import CLAIM, POLICY, SERVICE
from ddpjob_operator.cluster.owners import Key, Owner, key_of_pod, owner_of
from ddpjob_operator.core.values.actions import ReleasePod
from ddpjob_operator.core.values.names import FINALIZER, dns_label, job_labels, pvc_name
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.wire.pods import decode_pods

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
KEY = Key("ns", "digits")
OWNER = Owner("ns", "job-1")


def job(version: int, uid: str = "job-1", name: str = "digits", namespace: str = "ns") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}}


def pod(
    version: int,
    uid: str = "pod-1",
    *,
    name: str = "digits-0-0",
    phase: str = "Pending",
    owner: str | None = "job-1",
    label: str | None = "job-1",
    namespace: str = "ns",
) -> dict[str, Any]:
    labels = {"training.ddpjob.io/attempt": "0", "training.ddpjob.io/node-rank": "0"}
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    metadata["labels"] = labels | ({"training.ddpjob.io/uid": label} if label else {})
    if owner:
        metadata["ownerReferences"] = [{"kind": "DDPJob", "name": "digits", "uid": owner, "controller": True}]
    return {"metadata": metadata, "status": {"phase": phase}}


def child(version: int, uid: str = "child-1", owner: str | None = None, **metadata: Any) -> dict[str, Any]:
    """A Service, claim or policy of the job."""
    owner = "job-1" if owner is None and not metadata else owner
    known = {"name": "digits", "namespace": "ns", "uid": uid, "resourceVersion": str(version)} | metadata
    if owner:
        known["ownerReferences"] = [{"kind": "DDPJob", "name": "digits", "uid": owner, "controller": True}]
    return {"metadata": known}


def phases(cache: Cache, owner: Owner = OWNER) -> list[str]:
    return [view.phase.value for view in cache.observed(owner).pods]


def test_a_newer_version_replaces_an_older_one() -> None:
    cache = Cache()
    assert cache.put_pod(pod(5))
    assert cache.put_pod(pod(6, phase="Running"))
    assert phases(cache) == ["Running"]


@pytest.mark.parametrize("version", [4, 5])
def test_an_older_or_equal_version_is_no_news(version: int) -> None:
    cache = Cache()
    cache.put_pod(pod(5, phase="Running"))
    assert not cache.put_pod(pod(version, phase="Pending"))
    assert phases(cache) == ["Running"]


def test_a_pod_is_known_from_a_list_as_it_is_from_a_watch() -> None:
    watched = pod(5, phase="Running") | {"spec": {"nodeName": "node-1"}}
    times = {"creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": "2026-01-02T03:04:35Z"}
    watched["metadata"] |= times | {"finalizers": [FINALIZER]}
    (listed,) = decode_pods(json.dumps({"metadata": {}, "items": [watched]}).encode())["items"]
    pictures = []
    for found in (watched, listed):
        cache = Cache(clock=lambda: NOON)
        cache.put_job(job(1))
        assert cache.put_pod(found)
        pictures.append((cache.observed(OWNER), cache.drop_pod(found), owner_of(found), key_of_pod(found)))
    assert pictures[0] == pictures[1]
    assert pictures[0][0].pods[0].held


def going(version: int, grace: int) -> dict[str, Any]:
    """A pod whose deletion was asked for at NOON, by the clock of the API server."""
    made = pod(version, phase="Running")
    until = f"{NOON + timedelta(seconds=grace):%Y-%m-%dT%H:%M:%SZ}"
    made["metadata"] |= {"deletionTimestamp": until, "deletionGracePeriodSeconds": grace}
    return made


@pytest.mark.parametrize("skew", [-60, 0, 25])
def test_the_grace_of_a_deletion_is_counted_by_our_own_clock(skew: float) -> None:
    begin = NOON + timedelta(seconds=skew)
    times = iter([begin, begin + timedelta(seconds=5)])
    cache = Cache(clock=lambda: next(times))
    cache.put_pod(pod(5, phase="Running"))
    for version, grace in ((6, 30), (7, 2)):  # 5 s later somebody shortens it
        cache.put_pod(going(version, grace))
        assert cache.observed(OWNER).pods[0].gone_by == begin + timedelta(seconds=grace)


@pytest.mark.parametrize(("started", "gone_by"), [(10, 30), (50, 50)])
def test_the_grace_of_a_deletion_from_before_our_start_ends_no_sooner_than_that(started: float, gone_by: float) -> None:
    cache = Cache(clock=lambda: NOON + timedelta(seconds=started))
    cache.put_pod(going(5, grace=30))
    assert cache.observed(OWNER).pods[0].gone_by == NOON + timedelta(seconds=gone_by)


def bound(version: int) -> dict[str, Any]:
    """A pod that was bound at NOON, by the clock of the API server."""
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": f"{NOON:%Y-%m-%dT%H:%M:%SZ}"}
    return pod(version) | {"spec": {"nodeName": "node-1"}, "status": {"phase": "Pending", "conditions": [condition]}}


@pytest.mark.parametrize(("seen", "since"), [(True, 60), (False, 0)])
def test_the_wait_for_a_kubelet_is_counted_by_our_own_clock_where_it_is_seen_to_begin(seen: bool, since: float) -> None:
    times = iter(NOON + timedelta(seconds=seconds) for seconds in (60, 65))
    cache = Cache(clock=lambda: next(times))
    if seen:
        cache.put_pod(pod(5))
        cache.put_pod(bound(6))
    cache.put_pod(bound(7))
    assert cache.observed(OWNER).pods[0].unacknowledged_since == NOON + timedelta(seconds=since)


def over(version: int) -> dict[str, Any]:
    """A pod whose trainer ended an hour before NOON, by the clock of its node."""
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": f"{NOON - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"}
    trainer = {"name": "trainer", "state": {"terminated": ended}}
    return pod(version) | {"status": {"phase": "Failed", "containerStatuses": [trainer]}}


@pytest.mark.parametrize(("seen", "at"), [(True, NOON + timedelta(seconds=60)), (False, None)])
def test_an_end_is_dated_by_our_own_clock_where_it_is_seen_to_come(seen: bool, at: datetime | None) -> None:
    times = iter(NOON + timedelta(seconds=seconds) for seconds in (60, 65))
    cache = Cache(clock=lambda: next(times))
    if seen:
        cache.put_pod(pod(5, phase="Running"))
    assert cache.put_pod(over(6))
    assert not cache.put_pod(over(7)), "it is no news"
    assert cache.observed(OWNER).pods[0].end_seen == at


def test_versions_are_compared_as_numbers() -> None:
    cache = Cache()
    cache.put_job(job(9))
    assert cache.put_job(job(10))
    assert not cache.put_job(job(9))


def test_a_change_that_no_decision_depends_on_is_no_news() -> None:
    cache = Cache()
    cache.put_pod(pod(5))
    assert not cache.put_pod(pod(6))


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("first", "later", "counts"),
    [
        ("Failed", "Running", "Failed"),
        ("Failed", "Succeeded", "Failed"),
        ("Succeeded", "Failed", "Succeeded"),
        ("Running", "Failed", "Failed"),
    ],
)
def test_the_first_final_phase_counts_and_what_the_pod_said_then(first: str, later: str, counts: str) -> None:
    def ending(version: int, phase: str) -> dict[str, Any]:
        code = {"Failed": 1, "Succeeded": 0}.get(phase)
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        found = pod(version, phase=phase)
        found["status"]["containerStatuses"] = [{"name": "trainer", "state": state}]
        return found

    cache = Cache()
    cache.put_pod(ending(5, first))
    cache.put_pod(ending(6, later))
    (view,) = cache.observed(OWNER).pods
    assert view.termination is not None
    assert (view.phase.value, view.termination.exit_code) == (counts, int(counts == "Failed"))


def test_a_late_event_does_not_bring_back_what_is_gone() -> None:
    cache = Cache()
    cache.put_pod(pod(5))
    assert cache.drop_pod(pod(8))
    assert not cache.put_pod(pod(7, phase="Running"))
    assert phases(cache) == []


def test_a_stale_list_does_not_bring_back_what_is_gone() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_pod(pod(5))
    cache.drop_pod(pod(8))
    take_lists(cache, None, [job(4)], [pod(5)], 6)
    assert phases(cache) == []


def test_a_list_drops_what_it_lacks() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_pod(pod(5))
    assert take_lists(cache, None, [], [], 9) == {KEY}
    assert cache.job(KEY) is None
    assert phases(cache) == []


def test_a_list_does_not_drop_what_is_newer_than_itself() -> None:
    cache = Cache()
    cache.put_job(job(12))
    cache.put_pod(pod(13))
    take_lists(cache, None, [], [], 9)
    assert cache.job(KEY) is not None
    assert phases(cache) == ["Pending"]


def test_a_list_of_one_namespace_says_nothing_about_another() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_pod(pod(5))
    assert take_lists(cache, "other", [], [], 9) == set()
    assert phases(cache) == ["Pending"]


def test_a_new_job_of_the_same_name_replaces_the_old_one_and_its_children() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_child(OWNER, CLAIM, child(5))
    cache.put_job(job(9, uid="job-2"))
    assert cache.job(KEY) == job(9, uid="job-2")
    assert not cache.observed(Owner("ns", "job-2")).pvc_exists


def test_the_late_deletion_of_an_old_job_leaves_the_new_one() -> None:
    cache = Cache()
    cache.put_job(job(9, uid="job-2"))
    assert not cache.drop_job(job(8, uid="job-1"))
    assert cache.job(KEY) is not None


@pytest.mark.parametrize("label", [None, "mangled"])
def test_a_pod_belongs_to_the_job_that_controls_it_whatever_its_label_says(label: str | None) -> None:
    cache = Cache()
    cache.put_pod(pod(5, label=label))
    assert phases(cache) == ["Pending"]


@pytest.mark.parametrize(
    "references",
    [
        [],
        [{"kind": "ReplicaSet", "name": "web", "uid": "set-1", "controller": True}],
        [{"kind": "DDPJob", "name": "digits", "uid": "job-1"}],
    ],
    ids=["no owner", "another controller", "an owner that is no controller"],
)
def test_a_pod_with_our_labels_that_the_job_does_not_control_is_not_ours(references: list[dict[str, Any]]) -> None:
    cache, forged = Cache(), pod(5)
    forged["metadata"]["ownerReferences"] = references
    cache.put_pod(forged)
    assert phases(cache) == []


def test_a_pod_that_loses_its_owner_is_news_to_the_job_that_it_belonged_to() -> None:
    cache, orphan = Cache(), pod(6)
    cache.put_pod(pod(5))
    del orphan["metadata"]["ownerReferences"]
    orphan["metadata"]["labels"]["training.ddpjob.io/job"] = "digits"
    assert cache.put_pod(orphan)
    assert key_of_pod(orphan) == KEY
    assert phases(cache) == []


def test_a_pod_that_lost_the_labels_of_its_place_is_still_seen() -> None:
    cache, bare = Cache(), pod(5)
    bare["metadata"]["labels"] = {}
    cache.put_pod(bare)
    (view,) = cache.observed(OWNER).pods
    assert (view.attempt, view.node_rank) == (-1, None)


def test_a_pod_of_another_namespace_with_our_labels_is_not_ours() -> None:
    cache = Cache()
    cache.put_pod(pod(5, namespace="elsewhere"))
    assert phases(cache) == []


def initializer(version: int, number: int, phase: str = "Pending") -> dict[str, Any]:
    found = pod(version, f"init-{number}", name=f"digits-init-{number}", phase=phase)
    found["metadata"]["labels"] = {
        "training.ddpjob.io/uid": "job-1",
        "training.ddpjob.io/role": "initializer",
        "training.ddpjob.io/attempt": str(number),
    }
    return found


def test_the_pod_of_the_initializers_is_no_pod_of_the_gang() -> None:
    cache = Cache()
    assert cache.put_pod(initializer(5, 0, "Failed"))
    assert cache.put_pod(initializer(6, 1))
    assert cache.put_pod(pod(7))
    seen = cache.observed(OWNER)
    assert [view.name for view in seen.pods] == ["digits-0-0"]
    assert seen.initializer is not None
    assert (seen.initializer.name, seen.initializer.number) == ("digits-init-1", 1)
    cache.drop_pod(initializer(8, 1))
    left = cache.observed(OWNER).initializer
    assert left is not None
    assert left.name == "digits-init-0"


def test_a_pod_that_waits_for_a_rank_comes_after_those_that_have_one() -> None:
    cache = Cache()
    spare = pod(5, "spare", name="digits-0-s0")
    spare["metadata"]["labels"]["training.ddpjob.io/node-rank"] = "none"
    cache.put_pod(spare)
    cache.put_pod(pod(6))
    assert [(view.name, view.node_rank) for view in cache.observed(OWNER).pods] == [
        ("digits-0-0", 0),
        ("digits-0-s0", None),
    ]


def test_the_log_of_a_pod_is_kept_no_longer_than_the_pod() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_pod(pod(5))
    cache.put_log(OWNER, "pod-1", "the end")
    assert cache.observed(OWNER).logs == {"pod-1": "the end"}
    cache.drop_pod(pod(8))
    assert cache.observed(OWNER).logs == {}


def test_what_is_gone_is_forgotten_after_two_rounds_of_lists() -> None:
    cache = Cache()
    for number in range(100):
        cache.put_job(job(number + 1, uid=f"job-{number}", name=f"j{number}"))
        cache.put_child(Owner("ns", f"job-{number}"), CLAIM, child(5))
        cache.drop_job(job(number + 1, uid=f"job-{number}", name=f"j{number}"))
    cache.expire(200)
    assert len(cache._gone) == 100
    cache.expire(300)
    assert (cache._gone, cache._unwatched) == ({}, {})


def test_nothing_is_decided_about_a_namespace_before_its_lists_are_there() -> None:
    cache = Cache()
    assert not cache.is_listed("ns")
    take_lists(cache, "ns", [], [], 9)
    assert (cache.is_listed("ns"), cache.is_listed("other")) == (True, False)
    take_lists(cache, None, [], [], 9)
    assert cache.is_listed("other")


def test_the_service_is_known_from_the_answer_that_made_it() -> None:
    cache = Cache()
    service = child(5) | {
        "spec": {
            "clusterIP": "10.96.0.7",
            "ports": [{"port": 29500}],
            "selector": {"training.ddpjob.io/attempt": "3"},
        }
    }
    cache.put_service(OWNER, service)
    known = cache.observed(OWNER).service
    assert known is not None
    assert (known.host, known.port, known.attempt) == ("10.96.0.7", 29500, 3)


def test_how_a_trainer_ended_is_not_forgotten_where_the_kubelet_has_lost_it() -> None:
    """A kubelet may remove the container of a pod that is deleted before it has taken its last look at it."""
    cache, found = Cache(), pod(1, phase="Failed")
    said = {"terminated": {"exitCode": 143, "message": '{"version": 1, "attempt": 0, "step": 322}'}}
    found["status"]["containerStatuses"] = [{"name": "trainer", "state": said}]
    cache.put_pod(found)
    lost = pod(2, phase="Failed")
    lost["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    cache.put_pod(lost)
    (seen,) = cache.observed(OWNER).pods
    assert seen.termination is not None
    assert (seen.termination.exit_code, "322" in seen.termination.message) == (143, True)


def known(cache: Cache, owner: Owner = OWNER) -> set[tuple[str, str]]:
    return set(cache.observed(owner).children)


def test_only_a_deletion_that_came_after_it_was_seen_takes_a_child_away() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_child(OWNER, POLICY, child(9))
    assert cache.drop_child(POLICY, child(8, uid="an earlier one")) is None
    assert known(cache) == {("NetworkPolicy", "digits")}
    assert cache.drop_child(POLICY, child(12)) == KEY
    assert (known(cache), cache.is_lost(OWNER, POLICY, "digits")) == (set(), True)
    cache.put_child(OWNER, POLICY, child(9))
    assert known(cache) == set(), "an answer that was on its way does not bring it back"
    cache.put_child(OWNER, POLICY, child(15, uid="the next one"))
    assert (known(cache), cache.is_lost(OWNER, POLICY, "digits")) == ({("NetworkPolicy", "digits")}, False)


def test_a_child_that_only_lost_our_label_exists_for_who_asks_for_it() -> None:
    """The watch says DELETED, with the version that the change has given it."""
    cache = Cache()
    cache.put_job(job(4))
    cache.put_child(OWNER, POLICY, child(9))
    for change in (12, 20):
        assert cache.drop_child(POLICY, child(change)) == KEY
        cache.put_child(OWNER, POLICY, child(change - 1))
        assert known(cache) == set(), "an answer from before"
        cache.put_child(OWNER, POLICY, child(change))
        assert (known(cache), cache.is_lost(OWNER, POLICY, "digits")) == ({("NetworkPolicy", "digits")}, False)


def test_a_service_that_is_gone_leaves_its_address() -> None:
    cache = Cache()
    cache.put_job(job(4))
    cache.put_service(OWNER, child(9) | {"spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 29500}]}})
    assert cache.observed(OWNER).service_exists
    cache.drop_child(SERVICE, child(12))
    seen = cache.observed(OWNER)
    assert (seen.service, seen.service_exists, seen.address) == (None, False, "10.96.0.7")


def test_a_list_of_children_says_what_is_gone_of_its_kind_and_namespace_alone() -> None:
    cache, elsewhere = Cache(), Owner("other", "job-2")
    cache.put_job(job(4))
    cache.put_job(job(5, namespace="other", uid="job-2"))
    for owner in (OWNER, elsewhere):
        cache.put_child(owner, POLICY, child(9))
        cache.put_child(owner, CLAIM, child(9))
    assert cache.end_children(POLICY, "ns", frozenset(), 8) == [], "it is newer than the list"
    assert cache.end_children(POLICY, "ns", {("ns", "digits")}, 20) == []
    assert cache.end_children(POLICY, "ns", frozenset(), 20) == [KEY]
    assert known(cache) == {("PersistentVolumeClaim", "digits")}
    assert known(cache, elsewhere) == {("PersistentVolumeClaim", "digits"), ("NetworkPolicy", "digits")}


def test_the_child_of_an_earlier_job_of_that_name_is_no_child_of_this_one() -> None:
    cache = Cache()
    cache.put_job(job(4))
    label = {"training.ddpjob.io/job": "digits"}
    assert cache.job_of(child(5, owner="an earlier job")) is None
    assert cache.job_of(child(5, labels=label)) == (KEY, OWNER), "a claim that is retained has no owner"


@pytest.mark.parametrize("name", ["digits.v2", "2-digits", "digits-" * 10 + "v2"])
def test_a_label_leads_to_the_job_whose_name_is_no_label(name: str) -> None:
    """What has no controller has nothing else: a claim that is retained, a pod that was orphaned."""
    cache, key = Cache(), Key("ns", name)
    cache.put_job(job(4, name=name))
    labels = job_labels(name, "job-1")
    claim = child(9, name=pvc_name(name), labels=labels)
    assert cache.job_of(claim) == (key, OWNER)
    cache.put_child(OWNER, CLAIM, claim)
    assert cache.drop_child(CLAIM, child(12, name=pvc_name(name), labels=labels)) == key

    orphan = held(pod(6, owner=None))
    orphan["metadata"]["labels"] |= labels
    assert cache.key_of(orphan) == key
    cache.put_pod(orphan)
    assert cache.unclaimed(key, "job-1") == UNCLAIMED

    cache.drop_job(job(7, name=name))
    assert cache.key_of(orphan) == key_of_pod(orphan), "nothing is remembered of a job that is gone"


def test_a_controller_leads_to_its_name_whatever_other_job_has_that_for_its_label() -> None:
    cache, label = Cache(), dns_label("digits.v2")
    cache.put_job(job(4, name="digits.v2"))
    reference = {"kind": "DDPJob", "name": label, "uid": "job-2", "controller": True}
    assert cache.key_of(child(5, ownerReferences=[reference])) == Key("ns", label)


def test_a_new_leader_asks_for_what_no_list_has() -> None:
    cache = Cache()
    cache.put_service(OWNER, child(5) | {"spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 29500}]}})
    cache.put_report(OWNER, TrainerReport(uid="job-1", attempt=0, step=310))
    cache.distrust()
    known = cache.observed(OWNER)
    assert (known.service, known.report, cache.is_listed("ns")) == (None, None, False)


def test_a_job_is_confirmed_by_an_answer_that_was_asked_for_since_the_last_doubt() -> None:
    cache = Cache()
    cache.put_job(job(5))
    assert not cache.observed(OWNER).status_confirmed
    asked = cache.doubts
    cache.confirm_job(job(5), asked)
    assert cache.observed(OWNER).status_confirmed
    cache.distrust()
    cache.confirm_job(job(6), asked)
    assert not cache.observed(OWNER).status_confirmed
    cache.confirm_job(job(6), cache.doubts)
    assert cache.observed(OWNER).status_confirmed
    cache.drop_job(job(7))
    assert not cache.observed(OWNER).status_confirmed


def held(made: dict[str, Any], *, deleting: bool = False) -> dict[str, Any]:
    made["metadata"]["finalizers"] = ["training.ddpjob.io/job-tracking"]
    if deleting:
        made["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    return made


UNCLAIMED = (ReleasePod("digits-0-0", "pod-1"),)


def test_a_pod_of_a_job_that_is_gone_is_unclaimed_once_it_is_deleted() -> None:
    cache = Cache()
    cache.put_pod(held(pod(5)))
    assert cache.unclaimed(KEY, None) == ()
    cache.put_pod(held(pod(6), deleting=True))
    assert cache.unclaimed(KEY, "job-1") == ()
    assert cache.unclaimed(KEY, "job-2") == cache.unclaimed(KEY, None) == UNCLAIMED
    cache.drop_pod(pod(7))
    assert cache.unclaimed(KEY, None) == ()


def test_a_list_has_the_job_of_each_pod_looked_at_that_is_gone() -> None:
    assert take_lists(Cache(), None, [], [held(pod(5), deleting=True)], 9) == {KEY}
    assert take_lists(Cache(), "other", [], [], 9) == set()


def test_an_orphan_is_unclaimed_until_it_is_released() -> None:
    """Deleted with --cascade=orphan, a job leaves pods without a controller."""
    cache = Cache()
    cache.put_job(job(4))
    cache.put_pod(held(pod(5)))
    assert cache.put_pod(held(pod(6, owner=None)))
    key = key_of_pod(pod(6, owner=None))
    assert cache.unclaimed(key, None) == UNCLAIMED
    assert take_lists(cache, None, [], [held(pod(6, owner=None))], 9) == {KEY, key}
    cache.drop_pod(pod(10, owner=None))
    assert cache.unclaimed(key, None) == ()


def test_a_pod_that_was_released_after_it_left_its_job_is_not_released_again() -> None:
    cache = Cache()
    cache.put_pod(held(pod(6, owner=None)))
    key = key_of_pod(pod(6, owner=None))
    assert cache.unclaimed(key, None) == UNCLAIMED
    cache.put_pod(pod(7, owner=None))
    assert cache.unclaimed(key, None) == ()


def test_a_pod_that_only_lost_our_label_is_unclaimed() -> None:
    """The watch says DELETED, but nobody deleted it: it would keep its finalizer for ever."""
    cache = Cache()
    cache.put_pod(held(pod(5)))
    assert cache.drop_pod(held(pod(6)))
    assert cache.unclaimed(KEY, "job-1") == UNCLAIMED
    cache.forget_pod("pod-1")
    assert cache.unclaimed(KEY, "job-1") == ()


def test_nothing_is_remembered_of_pods_that_are_gone() -> None:
    cache = Cache()
    for uid in ("pod-1", "pod-2"):
        cache.put_pod(held(pod(5, uid)))
        cache.drop_pod(held(pod(7, uid), deleting=True))
    assert (cache._pods, cache._pods_of, cache._owners, cache._lost) == ({}, {}, {}, {})


@pytest.mark.parametrize("grace", [10**11, 2**63 - 1])
@pytest.mark.parametrize(("owner", "phase"), [("job-1", "Running"), (None, "Pending")])
def test_a_grace_that_no_calendar_has_keeps_no_list_from_its_end(owner: str | None, phase: str, grace: int) -> None:
    """Whoever deletes a pod chooses it, and one list has the pods of everybody."""
    cache, found = Cache(), pod(5, owner=owner, phase=phase)
    found["metadata"] |= {"deletionTimestamp": "2026-01-02T12:00:00Z", "deletionGracePeriodSeconds": grace}
    cache.put_pod(found)
    assert [view.deleting for view in cache.observed(OWNER).pods] == [True] * (owner is not None)


def test_a_job_that_a_list_lacks_is_not_brought_back_by_a_late_event() -> None:
    cache = Cache()
    take_lists(cache, None, [job(5)], [], 50)
    cache.expire(50)
    take_lists(cache, None, [], [], 100)
    cache.expire(100)
    assert not cache.put_job(job(6))
    assert cache.job(KEY) is None
