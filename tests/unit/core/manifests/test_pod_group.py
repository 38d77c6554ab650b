"""How a gang asks to be admitted as a whole, by each of those who can do that."""

from __future__ import annotations

from typing import Any

import pytest
from builders import UID, make_job
from looks import admitted
from tests.support import kubernetes_schemas

from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pod_group import COSCHEDULING, VOLCANO, build_pod_group, times, unknown_kind
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Manifest
from ddpjob_operator.core.values.observed import ServiceView

KUEUE = {"scheduling": {"gang": "Kueue", "queue": "research"}}
IN_PLACE = {"restart": {"scope": "InPlace"}}
GATES = [{"name": "kueue.x-k8s.io/admission"}]


def pod(node_rank: int | None = 0, attempt: int = 2, size: int | None = None, **spec: Any) -> Manifest:
    service = ServiceView("10.96.0.7", attempt)
    manifest = build_pod(admitted(make_job(**spec)), Place(attempt, node_rank, service, "digits-x", size))
    kubernetes_schemas.validate(manifest, kubernetes_schemas.latest_version(), strict=True)
    return manifest


def group(**spec: Any) -> Manifest:
    job = make_job(**spec)
    found = build_pod_group(admitted(job), "digits-36f16e3d-0")
    assert found is not None
    return found


def theirs(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if "ddpjob" not in value and "ddpjob" not in name}


@pytest.mark.parametrize("spec", [{}, KUEUE], ids=["no gang", "Kueue"])
def test_who_reads_no_pod_group_gets_none(spec: dict[str, Any]) -> None:
    job = make_job(**spec)
    assert build_pod_group(admitted(job), "digits-36f16e3d-0") is None


@pytest.mark.parametrize(
    ("scheduling", "version", "expected"),
    [
        ({"gang": "Coscheduling"}, COSCHEDULING, {"minMember": 4}),
        ({"gang": "Coscheduling", "timeoutSeconds": 90, "priorityClassName": "high"}, COSCHEDULING,
         {"minMember": 4, "scheduleTimeoutSeconds": 90}),
        ({"gang": "Volcano"}, VOLCANO, {"minMember": 4}),
        ({"gang": "Volcano", "queue": "research", "priorityClassName": "high", "timeoutSeconds": 90}, VOLCANO,
         {"minMember": 4, "queue": "research", "priorityClassName": "high"}),
    ],
    ids=["coscheduling", "coscheduling in time", "volcano", "a queue of volcano's"],
)  # fmt: skip
def test_a_pod_group_wants_all_nodes_at_once(scheduling: Manifest, version: str, expected: Manifest) -> None:
    found = group(nodes=4, scheduling=scheduling)
    assert (found["apiVersion"], found["kind"], found["spec"]) == (version, "PodGroup", expected)
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("digits-36f16e3d-0", "research")
    assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == [UID]


def test_an_elastic_gang_wants_no_more_than_its_fewest_nodes() -> None:
    assert group(nodes=4, elastic={"minNodes": 2}, scheduling={"gang": "Volcano"})["spec"]["minMember"] == 2


def test_a_pod_group_says_what_its_members_need_together() -> None:
    resources = {"requests": {"cpu": "500m", "memory": "1.5Gi"}, "limits": {"memory": "2Gi", "nvidia.com/gpu": 8}}
    needs = group(nodes=3, resources=resources, scheduling={"gang": "Volcano"})["spec"]["minResources"]
    assert needs == {"cpu": "1500m", "memory": "4.5Gi", "nvidia.com/gpu": "24"}


@pytest.mark.parametrize(("quantity", "sum_of_three"), [("1", "3"), ("500m", "1500m"), ("0.1", "0.3"), ("2E", "6E")])
def test_a_quantity_keeps_its_unit(quantity: str, sum_of_three: str) -> None:
    assert times(quantity, 3) == sum_of_three


def test_pods_are_members_by_what_their_scheduler_reads() -> None:
    coscheduled = pod(scheduling={"gang": "Coscheduling"})["metadata"]
    assert theirs(coscheduled["labels"])["scheduling.x-k8s.io/pod-group"] == "digits-36f16e3d-2"
    volcanic = pod(scheduling={"gang": "Volcano"})["metadata"]
    assert volcanic["annotations"] == {"scheduling.k8s.io/group-name": "digits-36f16e3d-2"}


@pytest.mark.parametrize("gang", ["Coscheduling", "Volcano"])
def test_a_spare_is_a_member_so_that_what_replaces_a_lost_pod_finds_a_whole_group(gang: str) -> None:
    metadata = pod(None, **IN_PLACE, scheduling={"gang": gang})["metadata"]
    assert "digits-36f16e3d-2" in (*theirs(metadata["labels"]).values(), *metadata["annotations"].values())


@pytest.mark.parametrize("scope", ["Gang", "InPlace"])
def test_each_attempt_is_a_group_of_its_own_in_a_queue(scope: str) -> None:
    for attempt, nodes in ((0, 4), (1, 3)):
        found = pod(1, attempt, nodes, nodes=4, restart={"scope": scope}, **KUEUE)
        assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert found["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == f"digits-36f16e3d-{attempt}"
        assert found["metadata"]["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": str(nodes),
            "kueue.x-k8s.io/retriable-in-group": "false",
            "kueue.x-k8s.io/role-hash": "trainer",
        }
        assert found["spec"]["schedulingGates"] == GATES


def test_a_pod_in_the_place_of_a_lost_one_joins_the_group_of_the_others() -> None:
    place = Place(5, 1, ServiceView("10.96.0.7", 5), group="digits-36f16e3d-2")
    metadata = build_pod(admitted(make_job(**KUEUE, **IN_PLACE)), place)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "digits-36f16e3d-2"


def test_a_spare_queues_for_itself_because_a_group_is_admitted_when_all_of_it_is_there() -> None:
    found = pod(None, **KUEUE, **IN_PLACE)
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/pod-group-name" not in found["metadata"]["labels"]
    assert found["metadata"]["annotations"] == {}
    assert found["spec"]["schedulingGates"] == GATES


def test_gates_labels_and_annotations_of_the_template_stay_unless_they_are_the_groups() -> None:
    template = {
        "metadata": {"labels": {"team": "ml", "kueue.x-k8s.io/queue-name": "other"}, "annotations": {"a": "b"}},
        "spec": {"schedulingGates": [{"name": "example.com/mine"}]},
    }
    found = pod(podTemplate=template, **KUEUE)
    assert (found["metadata"]["labels"]["team"], found["metadata"]["annotations"]["a"]) == ("ml", "b")
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert found["spec"]["schedulingGates"] == [{"name": "example.com/mine"}, *GATES]


def test_a_missing_kind_is_said_with_what_serves_it_and_the_way_out() -> None:
    problem = unknown_kind(VOLCANO, "PodGroup")
    assert problem.reason == "PodGroupMissing"
    assert problem.message == (
        "the API server knows no PodGroup of scheduling.volcano.sh/v1beta1: install Volcano, "
        "or remove scheduling.gang Volcano from the job"
    )


@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize("forced", [False, True])
def test_kueue_may_let_go_of_a_lost_pod_where_the_job_says_so(forced: bool, rank: int | None) -> None:
    restart = {"scope": "InPlace", "forceDeleteLostPods": forced}
    annotations = pod(rank, **KUEUE, restart=restart)["metadata"].get("annotations") or {}
    assert ("kueue.x-k8s.io/safe-to-forcefully-delete" in annotations) == forced


def test_annotations_for_an_autoscaler_reach_the_pods_of_a_queue_too() -> None:
    mine = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    found = pod(1, **KUEUE, podTemplate={"metadata": {"annotations": mine}})["metadata"]["annotations"]
    assert mine.items() <= found.items()
