"""`ddpjob drain-node`: whose the pods of a node are, and what is said of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob_operator.core.values.job import Job
from ddpjob_operator.follow.draining import (
    Held,
    OnNode,
    drained_in_words,
    eviction_version,
    interrupted_in_words,
    missing_rights_in_words,
    on_node,
    others_in_words,
    refusal_in_words,
    still_there_in_words,
    unreadable_in_words,
    what_follows,
)
from ddpjob_operator.wire.jobs import parse_job

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
OURS = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "name": "digits", "uid": "u", "controller": True}
DELETED = {"deletionTimestamp": "2030-01-01T12:01:00Z", "deletionGracePeriodSeconds": 60}
EXITED = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 143}}}]}


def job(phase: str = "Running", total: int = 3, deleting: bool = False, **spec: Any) -> Job:
    metadata = {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": NOW.isoformat()}
    status = {"phase": phase, "attempt": 0, "nodes": {"ready": total, "total": total}}
    metadata |= {"deletionTimestamp": NOW.isoformat()} if deleting else {}
    return parse_job({"metadata": metadata, "spec": {"nodes": 3, **spec}, "status": status})


def pod(
    rank: object = 1,
    *,
    attempt: int = 0,
    owner: dict[str, Any] | None = OURS,
    labels: dict[str, str] | None = None,
    status: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    place = {"training.ddpjob.io/attempt": str(attempt), "training.ddpjob.io/node-rank": str(rank)}
    made = {
        "name": f"digits-{attempt}-{'s0' if rank == 'none' else rank}",
        "namespace": "ml",
        "uid": f"of-{rank}",
        "labels": place if labels is None else labels,
        "ownerReferences": [owner] if owner is not None else [],
    }
    return {"metadata": made | metadata, "spec": {"nodeName": "n"}, "status": status or {"phase": "Running"}}


def initializer() -> dict[str, Any]:
    labels = {"training.ddpjob.io/attempt": "0", "training.ddpjob.io/role": "initializer"}
    return pod(labels=labels, name="digits-init-0")


def held(*pods: dict[str, Any]) -> tuple[Held, ...]:
    found = on_node(pods)
    assert len(found.held) == len(pods)
    return found.held


@pytest.mark.parametrize(
    "other",
    [
        pod(owner=None),
        pod(owner=OURS | {"controller": False}),
        pod(owner=OURS | {"apiVersion": "example.com/v1"}),
        pod(owner=OURS | {"apiVersion": "batch/v1", "kind": "Job"}),
    ],
    ids=["labels alone", "not its controller", "a DDPJob of another group", "a Job"],
)
def test_a_pod_that_no_job_controls_is_another_one_whatever_its_labels(other: dict[str, Any]) -> None:
    assert on_node([other]) == OnNode(others=1)


def test_pods_of_daemon_sets_and_static_ones_are_counted_among_the_others() -> None:
    daemon = pod(owner={"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": True})
    static = pod(owner=None, annotations={"kubernetes.io/config.mirror": "x"})
    assert on_node([daemon, static, pod(owner=None)]) == OnNode(others=3, static=2)


@pytest.mark.parametrize(
    ("found", "is_held"),
    [
        (pod(), True),
        (pod(status={"phase": "Pending"}), True),
        (pod(status={"phase": "Succeeded"}), False),
        (pod(status=EXITED), False),
        (pod(status={"phase": "Failed"}, **DELETED), True),
    ],
)
def test_a_pod_that_has_ended_is_waited_for_only_while_it_is_being_deleted(
    found: dict[str, Any], is_held: bool
) -> None:
    seen = on_node([found])
    assert (len(seen.held), seen.ended) == (1, 0) if is_held else (0, 1)


def test_pods_are_sorted_by_job() -> None:
    other = pod(0, owner=OURS | {"name": "alpha", "uid": "a"}, name="alpha-0-0")
    found = on_node([pod(2), other, pod(1)]).by_owner()
    assert [(str(owner), [str(each) for each in pods]) for owner, pods in found.items()] == [
        ("ml/alpha", ["ml/alpha-0-0"]),
        ("ml/digits", ["ml/digits-0-1", "ml/digits-0-2"]),
    ]


LIVE, IN_PLACE = {"restart": {"scope": "Live"}}, {"restart": {"scope": "InPlace"}}


@pytest.mark.parametrize(
    ("of", "pods", "words"),
    [
        (
            job(**LIVE),
            [pod(1)],
            "node rank 1 leaves at the end of a step, the other 2 go on, and a new pod joins later "
            "(restart.scope Live)",
        ),
        (
            job(**LIVE, spares=1),
            [pod(1)],
            "node rank 1 leaves at the end of a step, the other 2 go on, and a new pod or a spare joins later "
            "(restart.scope Live)",
        ),
        (
            job(**LIVE),
            [pod(0), pod(2)],
            "node ranks 0, 2 leave at the end of a step, the other one goes on, and 2 new pods join later "
            "(restart.scope Live)",
        ),
        (
            job(**LIVE, elastic={"minNodes": 2}),
            [pod(0), pod(2)],
            "fewer than elastic.minNodes: 2 would be left: all ranks save a snapshot, and the gang restarts from it in "
            "place, with 2 new pods (restart.scope Live)",
        ),
        (
            job(total=1, **LIVE),
            [pod(0)],
            "all of its pods are here: all ranks save a snapshot, and new pods go on from it (restart.scope Live)",
        ),
        (
            job(**IN_PLACE),
            [pod(1)],
            "all ranks save a snapshot, and the gang restarts from it in place, with a new pod for node rank 1 "
            "(restart.scope InPlace)",
        ),
        (
            job(**IN_PLACE, spares=1),
            [pod(1), pod("none")],
            "all ranks save a snapshot, and the gang restarts from it in place, with a new pod or a spare for node "
            "rank 1 (restart.scope InPlace); spare digits-0-s0 is replaced",
        ),
        (
            job(),
            [pod(1)],
            "all ranks save a snapshot, and the whole gang of 3 restarts from it with new pods (restart.scope Gang)",
        ),
        (
            job(entrypoint={"script": "/mnt/shared/train.py"}),
            [pod(1)],
            "all ranks save a snapshot, if the script makes any, and the whole gang of 3 restarts from it with new "
            "pods (restart.scope Gang)",
        ),
        (
            job(entrypoint={"module": "mine.train"}),
            [pod(1)],
            "all ranks save a snapshot, if the script makes any, and the whole gang of 3 restarts from it with new "
            "pods (restart.scope Gang)",
        ),
        (
            job(restart={"rules": [{"reasons": ["Drained"], "action": "Fail"}]}),
            [pod(1)],
            "all ranks save a snapshot, and the job fails: restart.rules[0] (reason Drained) says Fail",
        ),
        (job("Starting"), [pod(1)], "attempt 0 has not begun to train; it begins again with new pods"),
        (
            job("Starting", **IN_PLACE),
            [pod(1)],
            "attempt 0 has not begun to train; it begins again with a new pod for node rank 1",
        ),
        (job(spares=1, **IN_PLACE), [pod("none")], "spare digits-0-s0 is replaced"),
        (job("Pending"), [initializer()], "its initializers begin again in a new pod"),
        (job("Succeeded"), [pod(1)], "the job has succeeded; digits-0-1 goes"),
        (job(suspend=True), [pod(0), pod(1)], "the job is suspended; digits-0-0, digits-0-1 end"),
        (job(), [pod(1, **DELETED)], "digits-0-1 ends already"),
        (
            job(**LIVE),
            [pod(1, **DELETED), pod(2)],
            "node ranks 1, 2 leave at the end of a step, the other one goes on, and 2 new pods join later "
            "(restart.scope Live)",
        ),
        (job(), [pod(1, attempt=4)], "digits-4-1 is of an earlier attempt, and ends"),
        (job(deleting=True), [pod(1)], "the job is deleted, and digits-0-1 ends with it"),
        (None, [pod(1)], "the job is deleted, and digits-0-1 ends with it"),
    ],
)
def test_what_follows_for_a_job_is_said_in_one_line(of: Job | None, pods: list[dict[str, Any]], words: str) -> None:
    assert what_follows(of, held(*pods)) == words


def test_a_job_that_cannot_be_read_is_said_to_be() -> None:
    assert unreadable_in_words(held(pod(1))) == (
        "digits-0-1 is replaced as its restart.scope says, which cannot be read here"
    )


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (OnNode(), []),
        (OnNode(others=1), ["1 other pod stays on n; kubectl drain is for those"]),
        (
            OnNode(others=7, static=3, ended=2),
            [
                "2 pods of DDPJobs that have ended stay for the logs",
                "7 other pods stay on n (3 of DaemonSets or static); kubectl drain is for those",
            ],
        ),
        (OnNode(ended=1), ["1 pod of a DDPJob that has ended stays for the logs"]),
    ],
)
def test_what_is_left_alone_is_counted(found: OnNode, lines: list[str]) -> None:
    assert others_in_words(found, "n") == lines


def test_the_end_says_how_to_take_the_node_into_service_again() -> None:
    uncordon = "kubectl uncordon n takes it into service again"
    assert drained_in_words("n", found_any=True) == ("no pod of a DDPJob is left on n", uncordon)
    assert drained_in_words("n", found_any=False) == ("no pod of a DDPJob is on n", uncordon)
    assert interrupted_in_words("n", ["ml/a", "ml/b"]) == (
        f"n stays cordoned; evicted: ml/a, ml/b; the same command goes on; {uncordon}"
    )
    assert "evicted: no pod;" in interrupted_in_words("n", [])


@pytest.mark.parametrize(
    ("found", "refusal", "words"),
    [
        (pod(), "a budget", "ml/digits-0-1 is not evicted: a budget"),
        (pod(), None, "ml/digits-0-1 is not evicted: it was not asked yet"),
        (pod(**DELETED), None, "ml/digits-0-1 has until 12:01:00 UTC to end"),
        (
            pod(**DELETED | {"deletionTimestamp": "2030-01-01T11:00:00Z"}),
            None,
            "ml/digits-0-1 should have ended; check the kubelet of its node",
        ),
        (
            pod(status=EXITED, finalizers=["training.ddpjob.io/job-tracking"], **DELETED),
            None,
            "ml/digits-0-1 has ended, but no operator has put its end on record; check that the operator runs",
        ),
    ],
)
def test_why_a_pod_is_still_there_is_said(found: dict[str, Any], refusal: str | None, words: str) -> None:
    assert still_there_in_words(held(found)[0], refusal, NOW + timedelta(seconds=1)) == words


def test_a_pod_that_another_controller_holds_back_is_no_matter_of_its_kubelet() -> None:
    finalizers = ["kueue.x-k8s.io/managed", "example.com/hold"]
    late, (ended,) = NOW + timedelta(hours=1), held(pod(**DELETED, status=EXITED, finalizers=finalizers))
    assert still_there_in_words(ended, None, late) == (
        "ml/digits-0-1 has ended, and stays for the finalizers kueue.x-k8s.io/managed, example.com/hold, which "
        "whatever has set them removes"
    )


def test_a_budget_is_named_once() -> None:
    message = "Cannot evict pod as it would violate the pod's disruption budget."
    cause = {
        "reason": "DisruptionBudget",
        "message": "The disruption budget b needs 2 healthy pods and has 2 currently",
    }
    assert refusal_in_words(message, {"causes": [cause]}) == (
        "Cannot evict pod as it would violate the pod's disruption budget: The disruption budget b needs 2 healthy "
        "pods and has 2 currently"
    )
    assert refusal_in_words(message, {"causes": [{"message": message}]}) == message.rstrip(".")
    assert refusal_in_words(message, {"causes": "none"}) == message.rstrip(".")


def test_each_missing_right_is_named() -> None:
    both = missing_rights_in_words(["patch nodes", "create pods/eviction in namespace ml"], cordoned=False)
    assert both == (
        "you have no right to patch nodes and to create pods/eviction in namespace ml; nothing was changed; "
        "docs/operating.md has a ClusterRole for drains"
    )
    assert "nothing was changed" not in missing_rights_in_words(["patch nodes"], cordoned=True)


@pytest.mark.parametrize(
    ("resources", "version"),
    [
        ([{"name": "pods"}, {"name": "pods/eviction", "group": "policy", "version": "v1beta1"}], "policy/v1beta1"),
        ([{"name": "pods/eviction", "group": "policy", "version": "v1"}], "policy/v1"),
        ([], "policy/v1"),
    ],
)
def test_an_eviction_has_the_version_that_the_server_takes(resources: list[dict[str, Any]], version: str) -> None:
    assert eviction_version(resources) == version
