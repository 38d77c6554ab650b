"""Where a pod may run: what a job asks for is added to what its podTemplate says, and takes nothing from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, UID, make_job
from looks import admitted
from tests.support import kubernetes_schemas

from ddpjob_operator.core.manifests.placement import REQUIRED
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Bounds, Manifest
from ddpjob_operator.core.values.observed import ServiceView

OF_ATTEMPT = {"training.ddpjob.io/uid": UID, "training.ddpjob.io/attempt": "2"}
OF_JOB = {"training.ddpjob.io/uid": UID}
ON_THE_NETWORK = replace(DEFAULTS, bounds=Bounds(host_network=True))
IN_PLACE = {"restart": {"scope": "InPlace"}}
ZONE = "topology.kubernetes.io/zone"
MINE = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": ZONE}
GPU = {"key": "gpu", "operator": "In", "values": ["a100"]}
BIG = {"key": "memory", "operator": "In", "values": ["big"]}
NAMED = {"key": "metadata.name", "operator": "In", "values": ["c"]}
AWAY = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")]


def spec_of(
    placement: Manifest | None = None, template: Manifest | None = None, *, avoid: Any = (), **spec: Any
) -> Any:
    if template is not None:
        spec["podTemplate"] = {"spec": template}
    job = make_job(placement=placement or {}, **spec)
    manifest = build_pod(admitted(job, ON_THE_NETWORK), Place(2, 1, ServiceView("10.96.0.7", 2), avoid=avoid))
    kubernetes_schemas.validate(manifest, kubernetes_schemas.latest_version(), strict=True)
    return manifest["spec"]


def terms(spec: Manifest, kind: str) -> list[Manifest]:
    return list(spec["affinity"][kind][REQUIRED])


def test_a_job_that_asks_for_nothing_gets_no_affinity() -> None:
    assert "affinity" not in spec_of()
    assert not spec_of().keys() & {"hostNetwork", "dnsPolicy", "schedulerName", "priorityClassName"}


@pytest.mark.parametrize(("spec", "labels"), [({}, OF_ATTEMPT), (IN_PLACE, OF_JOB)], ids=["gang", "in place"])
def test_a_gang_is_kept_in_one_domain_of_a_label(spec: dict[str, Any], labels: dict[str, str]) -> None:
    (term,) = terms(spec_of({"topologyKey": ZONE}, **spec), "podAffinity")
    assert term["topologyKey"] == ZONE
    assert term["labelSelector"]["matchLabels"] == labels
    assert term["labelSelector"]["matchExpressions"] == [{"key": "training.ddpjob.io/node-rank", "operator": "Exists"}]


@pytest.mark.parametrize("placement", [{"onePodPerNode": True}, {"hostNetwork": True}], ids=str)
def test_no_two_pods_share_a_node(placement: Manifest) -> None:
    (term,) = terms(spec_of(placement), "podAntiAffinity")
    assert (term["topologyKey"], term["labelSelector"]["matchLabels"]) == ("kubernetes.io/hostname", OF_ATTEMPT)


def test_a_pod_on_the_nodes_network_still_resolves_services_and_keeps_its_ports_from_other_jobs() -> None:
    spec = spec_of({"hostNetwork": True})
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    # the API server makes each containerPort of such a pod a hostPort, which the scheduler gives to one pod of a node
    assert [port["containerPort"] for port in spec["containers"][0]["ports"]] == [9400, 29500]


def test_shared_memory_has_the_size_that_was_asked_for() -> None:
    volumes = {item["name"]: item for item in spec_of({"shmSize": "8Gi"})["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.parametrize(
    ("scheduling", "scheduler"),
    [
        ({"gang": "Coscheduling"}, "scheduler-plugins-scheduler"),
        ({"gang": "Volcano"}, "volcano"),
        ({"gang": "Volcano", "schedulerName": "mine"}, "mine"),
        ({"schedulerName": "mine"}, "mine"),
        ({"gang": "Kueue", "queue": "q"}, None),
    ],
    ids=str,
)
def test_each_gang_has_its_scheduler(scheduling: Manifest, scheduler: str | None) -> None:
    assert spec_of(scheduling=scheduling).get("schedulerName") == scheduler


def test_a_priority_class_is_handed_on() -> None:
    assert spec_of(scheduling={"priorityClassName": "high"})["priorityClassName"] == "high"


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("schedulerName", {"scheduling": {"gang": "Volcano"}}, "theirs"),
        ("priorityClassName", {"scheduling": {"priorityClassName": "high"}}, "theirs"),
        ("dnsPolicy", {"placement": {"hostNetwork": True}}, "Default"),
    ],
)
def test_what_the_template_sets_stays(field: str, ours: dict[str, Any], theirs: str) -> None:
    assert spec_of(**ours, template={field: theirs})[field] == theirs


@pytest.mark.parametrize(
    ("kind", "placement"), [("podAffinity", {"topologyKey": ZONE}), ("podAntiAffinity", {"onePodPerNode": True})]
)
def test_terms_of_the_template_stay_and_ours_is_added(kind: str, placement: Manifest) -> None:
    preferred = [{"weight": 1, "podAffinityTerm": MINE}]
    theirs = {
        kind: {REQUIRED: [MINE], "preferredDuringSchedulingIgnoredDuringExecution": preferred},
        "nodeAffinity": {},
    }
    spec = spec_of(placement, {"affinity": theirs})
    assert terms(spec, kind)[0] == MINE
    assert len(terms(spec, kind)) == 2
    assert spec["affinity"][kind]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred


@pytest.mark.parametrize("theirs", [None, {}, {"podAffinity": None}, {"podAffinity": {REQUIRED: None}}], ids=str)
def test_an_affinity_that_says_nothing_is_no_hindrance(theirs: Manifest | None) -> None:
    assert len(terms(spec_of({"topologyKey": ZONE}, {"affinity": theirs}), "podAffinity")) == 1


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (None, [{"matchFields": AWAY}]),
        ({REQUIRED: None}, [{"matchFields": AWAY}]),
        ({REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [GPU]}, {"matchExpressions": [BIG]}]}},
         [{"matchExpressions": [GPU], "matchFields": AWAY}, {"matchExpressions": [BIG], "matchFields": AWAY}]),
        ({REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": []}]}}, [{"matchExpressions": []}]),
        ({REQUIRED: {"nodeSelectorTerms": [{"matchFields": [NAMED]}]}},
         [{"matchFields": [NAMED, *AWAY]}]),
    ],
    ids=["none", "null", "each alternative", "one that matches nothing", "fields"],
)  # fmt: skip
def test_a_node_to_avoid_is_ruled_out_in_every_alternative(theirs: Manifest | None, expected: list[Manifest]) -> None:
    spec = spec_of(template={"affinity": {"nodeAffinity": theirs}}, avoid=("b", "a"))
    assert spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == expected


NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        pytest.param([], {NOT_READY: 12, UNREACHABLE: 12}, id="of every pod"),
        pytest.param(
            [{"key": "gpu", "operator": "Exists"}], {"gpu": None, NOT_READY: 12, UNREACHABLE: 12}, id="others"
        ),
        pytest.param(
            [{"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 99}],
            {UNREACHABLE: 99, NOT_READY: 12},
            id="the job's own",
        ),
        pytest.param([{"operator": "Exists"}], {None: None}, id="a pod that tolerates everything"),
    ],
)
def test_pods_leave_a_lost_node_in_time(given: list[dict[str, Any]], seconds: dict[str | None, int | None]) -> None:
    spec = spec_of(template={"tolerations": given}, restart={"nodeLostSeconds": 12})
    assert {item.get("key"): item.get("tolerationSeconds") for item in spec["tolerations"]} == seconds
