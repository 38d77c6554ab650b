"""`ddpjob doctor`: what each check makes of facts, one changed at a time in a cluster without a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tests.unit.answers import Server, ok

from ddpjob_operator.core.manifests.bounds import is_gpu
from ddpjob_operator.core.values.names import LABEL_MANAGED_BY, MANAGED_BY
from ddpjob_operator.follow.doctor.admission import JOBS, PODS, trial_job, trial_pod
from ddpjob_operator.follow.doctor.checkup import CHECKS, examine
from ddpjob_operator.follow.doctor.facts import (
    Claimable,
    Facts,
    Hook,
    NodeView,
    Right,
    Unread,
    parse_hooks,
    parse_node,
    parse_slice,
)
from ddpjob_operator.follow.doctor.findings import Finding, Level, summary
from ddpjob_operator.follow.doctor.nodes import normal
from ddpjob_operator.follow.doctor.operator import NEEDED, USEFUL
from ddpjob_operator.follow.doctor.policies import OF_A_POD, matches
from ddpjob_operator.follow.doctor.read import _Ask
from ddpjob_operator.follow.versions import operator_versions
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.submit.check import check

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
ROLE = Path(__file__).parents[3] / "charts/ddpjob-operator/files/rbac/submit.yaml"
IMAGE = "registry.example/ddpjob-trainer:1"
NODE = NodeView(
    "worker-1", True, False, (), {"cpu": Decimal(8), "memory": Decimal(2**34), "nvidia.com/gpu": Decimal(4)}, NOW,
    (IMAGE,),
)  # fmt: skip
HOOK = Hook(
    "pods.example",
    ({"operations": ["CREATE"], "apiGroups": [""], "resources": ["pods"]},),
    {"matchLabels": {"kubernetes.io/metadata.name": "ml"}},
    {},
    ("guard", "webhook"),
)
UNREAD = Unread("you have no right to list things", "ask")


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ddpjob-system"}, **more}


def storage_class(provisioner: str, default: str = "true", name: str = "standard") -> dict[str, Any]:
    annotations = {"storageclass.kubernetes.io/is-default-class": default}
    return {"metadata": {"name": name, "annotations": annotations}, "provisioner": provisioner}


def elsewhere(found: dict[str, Any]) -> dict[str, Any]:
    """That of another installation."""
    return found | {"metadata": found["metadata"] | {"namespace": "team-a"}}


def deployment(available: int = 1, **settings: str) -> dict[str, Any]:
    given = {"TRAINER_IMAGE": IMAGE, "NAMESPACES": "", "NETWORK_POLICY": "ingress"} | settings
    env = [{"name": f"DDPJOB_OPERATOR_{name}", "value": value} for name, value in given.items()]
    status = {"availableReplicas": available, "conditions": [{"status": "False", "message": "0 of 1 are ready"}]}
    spec = {"template": {"spec": {"containers": [{"name": "operator", "env": env}]}}}
    return named("ddpjob-operator", spec=spec, status=status)


def lease(age: timedelta, holder: str = "operator-0") -> dict[str, Any]:
    return named("ddpjob-operator", spec={"holderIdentity": holder, "renewTime": (NOW - age).isoformat()})


def quota(hard: dict[str, str], used: dict[str, str], **spec: Any) -> dict[str, Any]:
    return named("ml", spec={"hard": hard, **spec}, status={"hard": hard, "used": used})


def limit_range(kind: str, **bounds: dict[str, str]) -> dict[str, Any]:
    return named("bounds", spec={"limits": [{"type": kind, **bounds}]})


def policy(**spec: Any) -> dict[str, Any]:
    return named("deny", spec={"podSelector": {}, **spec})


HEALTHY = Facts(
    namespace="ml",
    local_time=NOW,
    server_time=NOW,
    versions=("v1alpha1",),
    access=dict.fromkeys((*NEEDED, *USEFUL), True),
    space={"metadata": {"name": "ml", "labels": {"kubernetes.io/metadata.name": "ml"}}},
    deployments=(deployment(),),
    leases=(lease(timedelta(seconds=2)),),
    jobs=(),
    classes=(storage_class("nfs.csi.k8s.io"),),
    nodes=(NODE,),
    claimable=(),
    node_pools=(),
    quotas=(),
    limits=(),
    policies=(),
    hooks=(HOOK,),
    endpoints={("guard", "webhook"): 1},
    failed_pulls=(),
    refusals={JOBS: "", PODS: ""},
)


def found(check: str, **changed: Any) -> Finding:
    (finding,) = (each for each in examine(replace(HEALTHY, **changed)) if each.check == check)
    return finding


def test_a_cluster_in_which_nothing_stops_a_job_is_ok_throughout() -> None:
    findings = examine(HEALTHY)
    assert {finding.level for finding in findings} == {Level.OK}, findings
    assert len(findings) == len(CHECKS) == len({finding.check for finding in findings})
    assert all(finding.fix == "" for finding in findings)
    assert found("nodes").message == "1 of 1 take pods: 8 CPUs and 16 Gi in all, at most 8 CPUs and 16 Gi on one"
    assert found("gpus").message == "4 nvidia.com/gpu on 1 of 1 nodes, at most 4 on one"


PROBLEM, WARNING, OK, UNKNOWN = Level.PROBLEM, Level.WARNING, Level.OK, Level.UNKNOWN
OF_TEAM_A = elsewhere(deployment(NAMESPACES="team-a", NETWORK_POLICY="off"))
"""The operator of another team, which serves its namespaces only."""
OPERATOR_MISSING = {"deployments": (), "leases": ()}
OLD_JOB = named("digits", spec={})
OLD_JOB["metadata"]["creationTimestamp"] = (NOW - timedelta(minutes=5)).isoformat()
LABELLED = replace(NODE, allocatable={"cpu": Decimal(8)}, has_gpu_hardware=True)
CLAIMABLE = Claimable("gpu.nvidia.com", NODE.name)
FARGATE = replace(NODE, allocatable={"cpu": Decimal(2)}, taints=("eks.amazonaws.com/compute-type=fargate:NoSchedule",))
TAINTED = replace(NODE, taints=("nvidia.com/gpu=present:NoSchedule",))
PULL = 'Failed to pull image "{}": rpc error: not found'
EGRESS_TO_ALL = policy(policyTypes=["Egress"], egress=[{"to": [{"podSelector": {}}]}])
EGRESS_TO_DNS = policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 53}]}])
NO_INGRESS = policy(policyTypes=["Ingress"])


@pytest.mark.parametrize(
    ("check", "changed", "level", "words"),
    [
        ("api", {"versions": ()}, PROBLEM, "the CRD is not installed"),
        ("api", {"versions": ("v1",)}, PROBLEM, "v1 is served, not v1alpha1"),
        ("rights", {"access": {}}, PROBLEM, "you may not create ddpjobs, get ddpjobs, create configmaps"),
        ("rights", {"access": dict.fromkeys(NEEDED, True)}, WARNING, "not delete ddpjobs"),
        ("rights", {"access": UNREAD}, UNKNOWN, "no right to"),
        ("operator", OPERATOR_MISSING, PROBLEM, "no operator is installed"),
        (
            "operator",
            {"deployments": (deployment(0),)},
            PROBLEM,
            "no replica of Deployment ddpjob-system/ddpjob-operator",
        ),
        ("operator", {"deployments": (deployment(0),)}, PROBLEM, "0 of 1 are ready"),
        ("operator", {"deployments": (deployment(NAMESPACES="a,b"),)}, PROBLEM, "does not serve the namespace ml"),
        ("operator", {"deployments": (deployment(NAMESPACES="a, ml"),)}, OK, "serves ml"),
        (
            "operator",
            {"deployments": (deployment(0, SHARDS="2", SHARD="1"), deployment(SHARDS="2", SHARD="0"))},
            OK,
            "serves ml",
        ),
        ("operator", {"deployments": (deployment(SHARDS="2", SHARD="1"),)}, PROBLEM, "does not serve the namespace ml"),
        (
            "operator",
            {"deployments": (deployment(), elsewhere(deployment(NAMESPACES="ml")))},
            PROBLEM,
            "Deployment ddpjob-system/ddpjob-operator and Deployment team-a/ddpjob-operator both serve ml",
        ),
        ("operator", {"deployments": (elsewhere(deployment(0)), deployment())}, OK, "serves ml"),
        ("operator", {"deployments": (deployment(), deployment())}, OK, "serves ml"),
        ("operator", {"namespace": "ddpjob-system"}, PROBLEM, "does not serve"),
        ("operator", {"namespace": "kube-system"}, PROBLEM, "never served"),
        ("operator", {"leases": (lease(timedelta(minutes=3)),)}, PROBLEM, "nobody has renewed the Lease"),
        ("operator", {"leases": (lease(timedelta(seconds=1), ""),)}, PROBLEM, "nobody holds the Lease"),
        ("operator", {"deployments": UNREAD}, OK, "one holds the Lease ddpjob-system/ddpjob-operator"),
        ("operator", {"deployments": UNREAD, "leases": UNREAD}, UNKNOWN, "no right to"),
        ("operator", {"deployments": UNREAD, "jobs": (OLD_JOB,)}, PROBLEM, "the job digits has no status"),
        ("operator", {"jobs": (OLD_JOB | {"spec": {"managedBy": "kueue.x-k8s.io/multikueue"}},)}, OK, "available"),
        ("webhooks", {"endpoints": {("guard", "webhook"): 0}}, PROBLEM, "Service guard/webhook has no ready endpoint"),
        ("webhooks", {"endpoints": {("guard", "webhook"): UNREAD}}, UNKNOWN, "no right to"),
        ("webhooks", {"hooks": UNREAD}, UNKNOWN, "no right to"),
        ("webhooks", {"hooks": (replace(HOOK, service=None),)}, OK, "1 fail closed"),
        ("admission", {"refusals": {JOBS: "name a team", PODS: ""}}, PROBLEM, "a job is refused: name a team"),
        ("admission", {"refusals": {JOBS: "", PODS: "no root"}}, PROBLEM, "the pod of a job is refused: no root"),
        ("admission", {"refusals": {JOBS: UNREAD, PODS: "no root"}}, PROBLEM, "the pod of a job is refused"),
        ("admission", {"refusals": {JOBS: UNREAD, PODS: ""}}, UNKNOWN, "no right to"),
        ("admission", {"refusals": {JOBS: "", PODS: UNREAD}}, OK, "a job is taken in a dry run; its pod was not tried"),
        ("mesh", {"space": UNREAD}, UNKNOWN, "no right to"),
        ("mesh", {"space": {"metadata": {"labels": {"istio-injection": "disabled"}}}}, OK, "nothing says"),
        (
            "mesh",
            {"space": {"metadata": {"labels": {"istio-injection": "disabled", "istio.io/rev": "stable"}}}},
            OK,
            "nothing says",
        ),
        ("mesh", {"space": {"metadata": {"labels": {"istio.io/dataplane-mode": "ambient"}}}}, WARNING, "=ambient"),
        ("mesh", {"space": {"metadata": {"annotations": {"linkerd.io/inject": "enabled"}}}}, WARNING, "=enabled"),
        ("mesh", {"space": {"metadata": {"labels": {"kuma.io/sidecar-injection": "true"}}}}, WARNING, "kuma.io"),
        ("mesh", {"space": {"metadata": {"labels": {"kuma.io/sidecar-injection": "false"}}}}, OK, "nothing says"),
        ("pod security", {"space": None}, PROBLEM, "there is no namespace ml"),
        ("pod security", {"space": UNREAD}, UNKNOWN, "no right to"),
        ("quota", {"quotas": (quota({"pods": "4"}, {"pods": "4"}),)}, PROBLEM, "nothing is left of pods"),
        ("quota", {"quotas": (quota({"pods": "4"}, {"pods": "1"}),)}, OK, "left: 3 of 4 pods"),
        ("quota", {"quotas": (quota({"pods": "4"}, {"pods": "4"}, scopes=["BestEffort"]),)}, WARNING, "of pods"),
        (
            "quota",
            {"quotas": (quota({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "8"}),)},
            WARNING,
            "nothing is left of requests.nvidia.com/gpu",
        ),
        ("quota", {"quotas": (quota({"memory": "1Gi"}, {}),)}, WARNING, "do not name requests.memory are refused"),
        ("quota", {"quotas": UNREAD}, UNKNOWN, "no right to"),
        (
            "quota",
            {
                "quotas": (quota({"limits.cpu": "9500m"}, {"limits.cpu": "2"}),),
                "limits": (limit_range("Container", default={"cpu": "1"}),),
            },
            OK,
            "left: 7.5 of 9.5 limits.cpu",
        ),
        (
            "limits",
            {"limits": (limit_range("PersistentVolumeClaim", max={"storage": "5Gi"}),)},
            PROBLEM,
            "claims of more than 5Gi are refused, and a job asks for 10Gi",
        ),
        (
            "limits",
            {"limits": (limit_range("Container", default={"memory": "512Mi"}),)},
            WARNING,
            "at most memory 512Mi",
        ),
        ("limits", {"limits": (limit_range("Container", max={"cpu": "8"}),)}, OK, "never more than cpu 8"),
        ("limits", {"limits": UNREAD}, UNKNOWN, "no right to"),
        ("storage", {"classes": ()}, PROBLEM, "there is no StorageClass"),
        ("storage", {"classes": (storage_class("nfs.csi.k8s.io", "false"),)}, PROBLEM, "there is standard"),
        ("storage", {"classes": (storage_class("ebs.csi.aws.com"),)}, WARNING, "has volumes for one node"),
        ("storage", {"classes": (storage_class("kubernetes.io/no-provisioner"),)}, WARNING, "makes no volumes"),
        ("storage", {"classes": UNREAD}, UNKNOWN, "no right to"),
        ("nodes", {"nodes": ()}, PROBLEM, "the cluster has no node"),
        (
            "nodes",
            {"nodes": (replace(NODE, ready=False), replace(NODE, cordoned=True))},
            PROBLEM,
            "1 not ready, 1 cordoned",
        ),
        ("nodes", {"nodes": (TAINTED,)}, PROBLEM, "1 tainted nvidia.com/gpu=present:NoSchedule"),
        ("nodes", {"nodes": UNREAD}, UNKNOWN, "no right to"),
        ("gpus", {"nodes": (replace(NODE, allocatable={}),)}, WARNING, "no node offers any"),
        ("nodes", {"nodes": (), "node_pools": ("gpu",)}, OK, "Karpenter adds nodes for pods (NodePool gpu)"),
        ("nodes", {"nodes": (FARGATE,), "node_pools": ("gpu",)}, OK, "none of 1 takes pods now (1 tainted eks."),
        ("nodes", {"nodes": (replace(NODE, ready=False),), "node_pools": ("gpu",)}, PROBLEM, "1 not ready"),
        ("nodes", {"nodes": (FARGATE,), "node_pools": UNREAD}, PROBLEM, "none of 1 takes pods: 1 tainted eks."),
        ("gpus", {"nodes": (FARGATE,), "node_pools": ("gpu",)}, OK, "no node offers any now; Karpenter adds nodes"),
        ("gpus", {"nodes": (LABELLED,), "node_pools": ("gpu",)}, WARNING, "no device plugin offers them"),
        ("gpus", {"nodes": (LABELLED,)}, WARNING, "no device plugin offers them"),
        ("gpus", {"nodes": (LABELLED,), "claimable": UNREAD}, WARNING, "no device plugin offers them"),
        ("gpus", {"nodes": (LABELLED,), "claimable": (CLAIMABLE,)}, OK, "devices of gpu.nvidia.com, which pods claim"),
        (
            "gpus",
            {"nodes": (LABELLED,), "claimable": (CLAIMABLE._replace(driver="dra.net"),)},
            WARNING,
            "no device plugin offers them",
        ),
        (
            "gpus",
            {"nodes": (LABELLED, replace(LABELLED, name="worker-2")), "claimable": (CLAIMABLE,)},
            WARNING,
            "worker-2: GPUs are there",
        ),
        ("gpus", {"nodes": (TAINTED,)}, WARNING, "every node with GPUs is tainted"),
        ("gpus", {"nodes": (replace(NODE, cordoned=True),)}, WARNING, "takes pods: cordoned"),
        ("image", {"nodes": (replace(NODE, images=()),)}, OK, "is on no node yet"),
        (
            "image",
            {"nodes": (replace(NODE, images=()),), "deployments": (deployment(TRAINER_IMAGE="localhost/trainer:1"),)},
            WARNING,
            "no registry has it",
        ),
        ("image", {"nodes": (replace(NODE, images=()),), "failed_pulls": (PULL.format(IMAGE),)}, PROBLEM, IMAGE),
        ("image", {"failed_pulls": (PULL.format(IMAGE),)}, WARNING, f"could not pull {IMAGE}"),  # it is there by now
        ("image", {"failed_pulls": (PULL.format("other:1"),)}, WARNING, "could not pull other:1"),
        ("image", {"failed_pulls": UNREAD}, UNKNOWN, "no right to"),
        ("image", {"deployments": UNREAD}, UNKNOWN, "is not seen"),
        ("image", {"nodes": UNREAD}, UNKNOWN, "is not seen"),
        ("network", {"policies": (EGRESS_TO_DNS,)}, PROBLEM, "NetworkPolicy deny keeps pods of a job from each other"),
        ("network", {"policies": (EGRESS_TO_DNS, EGRESS_TO_ALL)}, OK, "no NetworkPolicy keeps"),
        ("network", {"policies": (NO_INGRESS,)}, OK, "no NetworkPolicy keeps"),
        (
            "network",
            {"policies": (NO_INGRESS,), "deployments": (deployment(NETWORK_POLICY="off"),)},
            PROBLEM,
            "(ingress)",
        ),
        ("network", {"policies": (NO_INGRESS,), "deployments": UNREAD}, WARNING, "unless the operator makes policies"),
        (
            "network",
            {"policies": (NO_INGRESS,), "deployments": (OF_TEAM_A, deployment())},
            OK,
            "no NetworkPolicy keeps",
        ),
        (
            "network",
            {"policies": (NO_INGRESS,), "deployments": (OF_TEAM_A,)},
            WARNING,
            "unless the operator makes policies",
        ),
        (
            "network",
            {"policies": (policy(podSelector={"matchLabels": {"app": "web"}}, policyTypes=["Egress"]),)},
            OK,
            "no NetworkPolicy keeps",
        ),
        ("network", {"policies": UNREAD}, UNKNOWN, "no right to"),
        ("clock", {"local_time": NOW + timedelta(minutes=2)}, WARNING, "120 s ahead of the API server"),
        ("clock", {"local_time": NOW - timedelta(minutes=2)}, WARNING, "120 s behind the API server"),
        (
            "clock",
            {"nodes": (replace(NODE, heartbeat=NOW + timedelta(minutes=2)),)},
            WARNING,
            "clock of worker-1 is ahead",
        ),
        ("clock", {"nodes": (replace(NODE, heartbeat=NOW - timedelta(minutes=4)),)}, OK, "differ by 0 s"),
        ("clock", {"server_time": None}, UNKNOWN, "have no Date"),
    ],
)
def test_what_would_stop_a_job_is_found(check: str, changed: Mapping[str, Any], level: Level, words: str) -> None:
    finding = found(check, **changed)
    assert finding.level is level, finding
    assert words in finding.message
    assert bool(finding.fix) is (level in (PROBLEM, WARNING)) or level is UNKNOWN


@pytest.mark.parametrize(("key", "may_be_added"), [("nvidia.com/gpu", True), ("team", False)])
def test_a_cluster_may_add_tolerations_that_are_named_like_the_gpus(key: str, may_be_added: bool) -> None:
    """As GKE does, which also taints its nodes so."""
    fix = found("gpus", nodes=(replace(NODE, taints=(f"{key}=present:NoSchedule",)),)).fix
    assert fix.startswith(f"in podTemplate.spec.tolerations: {{key: {key}, operator: Exists, effect: NoSchedule}}")
    assert ("not needed for nvidia.com/gpu if the cluster adds it" in fix) is may_be_added


def test_gpus_that_an_autoscaler_adds_need_no_device_plugin_now() -> None:
    """Of those only Karpenter shows that it adds nodes."""
    cpus = replace(NODE, allocatable={"cpu": Decimal(8)})
    assert "unless an autoscaler adds nodes with GPUs" in found("gpus", nodes=(cpus,)).fix


def test_what_is_tried_is_a_job_that_names_nothing_and_its_pod() -> None:
    job, pod = trial_job("ml"), trial_pod("ml", IMAGE)
    assert check(job, Path.cwd()).job.spec.nodes == 1
    assert (pod["metadata"]["namespace"], pod["spec"]["containers"][0]["image"]) == ("ml", IMAGE)
    assert "finalizers" not in pod["metadata"], "of a job that is not there"
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["controller"]) == ("DDPJob", True), "policies refuse bare pods"
    assert not owner["blockOwnerDeletion"], "which would take a right of its own"
    assert pod["metadata"]["labels"].items() >= {LABEL_MANAGED_BY: MANAGED_BY}.items(), "policies select by it"


def test_a_job_is_sent_to_a_file_system_and_not_to_a_mounted_bucket() -> None:
    """The first class of AKS by name, where its driver is enabled, is azureblob-fuse-premium."""
    disks, blobs = storage_class("disk.csi.azure.com"), storage_class("blob.csi.azure.com", "false", "azureblob-fuse")
    files = storage_class("file.csi.azure.com", "false", "azurefile-csi")
    assert "storageClassName: azurefile-csi" in found("storage", classes=(blobs, files, disks)).fix
    assert "storageClassName" not in found("storage", classes=(blobs, disks)).fix
    buckets = storage_class("blob.csi.azure.com")
    assert found("storage", classes=(buckets,)).level is WARNING
    assert found("storage", classes=(buckets | {"parameters": {"protocol": "nfs"}},)).level is OK


def test_a_webhook_that_does_not_see_what_a_job_creates_is_of_no_concern() -> None:
    no_endpoint = {("guard", "webhook"): 0}
    elsewhere = replace(HOOK, namespace_selector={"matchLabels": {"kubernetes.io/metadata.name": "other"}})
    of_deployments = replace(HOOK, rules=({"operations": ["*"], "apiGroups": ["apps"], "resources": ["*"]},))
    for_others = replace(HOOK, object_selector={"matchLabels": {"app": "web"}})
    for hook in (elsewhere, of_deployments, for_others):
        assert found("webhooks", hooks=(hook,), endpoints=no_endpoint).level is OK, hook
    unseen = found("webhooks", hooks=(elsewhere,), endpoints=no_endpoint, space=UNREAD)
    assert unseen.level is PROBLEM, "of a namespace whose labels are not known any hook may be concerned"


def test_what_may_not_be_read_names_the_right_and_stops_no_other_check() -> None:
    readable = ("namespace", "local_time", "server_time", "versions", "endpoints", "refusals")
    hidden = {name: UNREAD for name in Facts.__slots__ if name not in readable}
    findings = examine(replace(HEALTHY, **hidden, refusals={JOBS: UNREAD, PODS: UNREAD}))
    assert {finding.level for finding in findings} == {OK, UNKNOWN}
    assert summary(findings) == "0 problems, 0 warnings, 13 unknown"


def test_the_rights_are_those_of_the_chart_s_role() -> None:
    rules = yaml.safe_load(ROLE.read_text())
    granted = {
        Right(verb, group, *resource.split("/"))
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {*NEEDED, *USEFUL}


@pytest.mark.parametrize(
    ("resource", "counted"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/gpu.shared", True),
        ("nvidia.com/mig-1g.5gb.shared", True),
        ("amd.com/cpx_nps4", True),
        ("gpu.intel.com/xe", True),
        ("habana.ai/gaudi", True),
        ("gpu.intel.com/i915_monitoring", False),
        ("gpu.intel.com/monitoring", False),
        ("vpc.amazonaws.com/efa", False),
        ("cpu", False),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_device_plugin_gives_it(resource: str, counted: bool) -> None:
    assert is_gpu(resource) is counted


def test_devices_that_pods_claim_are_read_as_the_api_server_sends_them() -> None:
    pool = {"name": "worker-1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "worker-1", "pool": pool, "devices": [{"name": "gpu-0"}]}
    assert parse_slice({"metadata": {"name": "worker-1-x7k2p"}, "spec": spec}) == CLAIMABLE
    assert parse_slice({"metadata": {"name": "net"}, "spec": {"driver": "dra.net", "allNodes": True}}).node is None


def test_nodes_and_webhooks_are_read_as_the_api_server_sends_them() -> None:
    node = parse_node(
        {
            "metadata": {"name": "gpu-1", "labels": {"nvidia.com/gpu.present": "true"}},
            "spec": {
                "unschedulable": True,
                "taints": [
                    {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
                    {"key": "gpu", "value": "a100", "effect": "NoSchedule"},
                    {"key": "soft", "effect": "PreferNoSchedule"},
                ],
            },
            "status": {
                "allocatable": {"cpu": "7500m", "nvidia.com/gpu": "8"},
                "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2030-01-01T12:00:00Z"}],
                "images": [{"names": [IMAGE]}, {}],
            },
        }
    )
    assert node == NodeView(
        "gpu-1", True, True, ("gpu=a100:NoSchedule",), {"cpu": Decimal("7.5"), "nvidia.com/gpu": Decimal(8)}, NOW,
        (IMAGE,), True,
    )  # fmt: skip
    client = {"service": {"namespace": "guard", "name": "webhook"}}
    rule = {"operations": ["CREATE"], "apiGroups": [""], "resources": ["pods"]}
    (hook,) = parse_hooks(
        {
            "webhooks": [
                {"name": "open", "failurePolicy": "Ignore", "clientConfig": client},
                {"name": "closed", "clientConfig": client, "rules": [rule]},
            ]
        }
    )
    assert hook == Hook("closed", (rule,), {}, {}, ("guard", "webhook"))


@pytest.mark.parametrize(
    ("selector", "matched"),
    [
        ({}, True),
        ({"matchLabels": {"app.kubernetes.io/managed-by": "ddpjob"}}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, False),
    ],
)
def test_a_label_selector_matches_as_in_kubernetes(selector: dict[str, Any], matched: bool) -> None:
    assert matches(selector, OF_A_POD) is matched


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("org/image:1", "docker.io/org/image:1"),
        ("localhost/trainer:1", "localhost/trainer:1"),
        ("registry.example:5000/a", "registry.example:5000/a:latest"),
        ("quay.io/a@sha256:00", "quay.io/a@sha256:00"),
    ],
)
def test_an_image_is_recognised_by_its_whole_name(name: str, whole: str) -> None:
    assert normal(name) == whole


def test_a_finding_is_one_line_with_its_fix_below_without_control_characters() -> None:
    finding = Finding("nodes", Level.PROBLEM, "none\x1b[2J\ntakes pods", "add one")
    assert finding.lines(None) == [
        "problem  nodes         none[2J takes pods",
        "                       fix: add one",
    ]


async def test_the_dashboard_of_the_chart_is_no_operator(server: Server, client: Client) -> None:
    """It has the label of the release too. It was one that serves every namespace, and holds another Lease."""
    operator, dashboard, held = deployment(), deployment(), lease(timedelta(seconds=2))
    for found, of in ((operator, "ddpjob-operator"), (dashboard, "ddpjob-dashboard")):
        found["spec"]["template"]["metadata"] = {"labels": {"app.kubernetes.io/name": of}}
    dashboard["metadata"]["name"] = "ddpjob-operator-dashboard"

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/leases/" in request.path:
            return ok(held)
        return ok({"metadata": {"resourceVersion": "1"}, "items": [dashboard, operator]})

    server.answers = [answer]
    assert await _Ask(client, "ml").operators() == ((operator,), (held,))
    assert [version.name for version in await operator_versions(client)] == ["ddpjob-operator"]
