"""The manifests of a gang: valid for every supported server, restricted by default, and ours where it matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, UID, make_job
from looks import admitted
from tests.support import kubernetes_schemas

from ddpjob_operator.core.manifests.merge import merge
from ddpjob_operator.core.manifests.pod_environment import Place, launch_args
from ddpjob_operator.core.manifests.pods import build_pod, build_pvc, build_service
from ddpjob_operator.core.values.job import Bounds, Manifest, PodSecurity
from ddpjob_operator.core.values.observed import ServiceView
from ddpjob_operator.local.expansion import expand

ANY_POD = replace(DEFAULTS, bounds=Bounds(pod_security=PodSecurity.PRIVILEGED))
SERVICE = ServiceView("10.96.0.7", 2)
VARIABLES = {"RANK": "expanded", "X": "expanded", "": "expanded"}
SCHEMAS = ("1.25", kubernetes_schemas.latest_version())

SIDECAR = {"name": "logs", "image": "busybox", "ports": [{"containerPort": 1}, {"containerPort": 2}]}
TEMPLATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "placement": {
        "nodeSelector": {"gpu": "a100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "a sidecar": {"containers": [SIDECAR]},
    "an init container": {"initContainers": [{"name": "fetch", "image": "busybox"}]},
    "a volume of its own": {
        "volumes": [{"name": "extra", "hostPath": {"path": "/data"}}],
        "containers": [{"name": "trainer", "volumeMounts": [{"name": "extra", "mountPath": "/data"}]}],
    },
    "another /dev/shm": {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]},
    "no user id": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "nothing said in many words": {"containers": None, "volumes": None, "securityContext": None},
}


def pod(template: dict[str, Any] | None = None, node_rank: int = 1, attempt: int = 2, **spec: Any) -> Manifest:
    if template is not None:
        spec["podTemplate"] = {"spec": template}
    return build_pod(admitted(make_job(**spec), ANY_POD), Place(attempt, node_rank, SERVICE))


def trainer(manifest: Manifest) -> dict[str, Any]:
    (container,) = (item for item in manifest["spec"]["containers"] if item["name"] == "trainer")
    return dict(container)


def env(manifest: Manifest) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in trainer(manifest)["env"]}


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_pod_is_valid_for_the_api_server(template: dict[str, Any], version: str) -> None:
    manifest = pod(
        template,
        env=[{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        resources={"requests": {"cpu": "500m"}, "limits": {"nvidia.com/gpu": 8}},
    )
    kubernetes_schemas.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("shared", [{}, {"size": "1Ti", "storageClassName": "nfs", "retain": False}], ids=str)
def test_service_and_claim_are_valid_for_the_api_server(shared: dict[str, Any], version: str) -> None:
    kubernetes_schemas.validate(build_service(admitted(make_job()), 2), version, strict=True)
    kubernetes_schemas.validate(build_pvc(admitted(make_job(shared=shared))), version, strict=True)


def breaches(manifest: Manifest) -> list[str]:
    """What the Pod Security Standards' profile `restricted` forbids in a pod (kubernetes.io/docs, version 1.25 on)."""
    spec = manifest["spec"]
    of_pod = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    sources = {"name", "configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
    found += [f"volume {item['name']}" for item in spec["volumes"] if not set(item) <= sources]
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        own = container.get("securityContext", {})
        merged = of_pod | own
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": "ALL" in own.get("capabilities", {}).get("drop", ())
            and set(own["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": merged.get("runAsNonRoot") is True,
            "runAsUser": merged.get("runAsUser") != 0,
            "seccompProfile": merged.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "hostPorts": not any(port.get("hostPort") for port in container.get("ports", ())),
        }
        found += [f"{container['name']}: {name}" for name, holds in checks.items() if not holds]
    return found


@pytest.mark.parametrize("name", ["nothing", "placement", "another /dev/shm", "no user id"])
def test_a_pod_keeps_to_the_restricted_profile_unless_the_user_leaves_it(name: str) -> None:
    assert breaches(pod(TEMPLATES[name])) == []


def test_a_user_may_leave_the_restricted_profile_on_purpose() -> None:
    own = {"containers": [{"name": "trainer", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}]}
    manifest = pod(own)
    assert breaches(manifest) == ["trainer: capabilities"]
    assert trainer(manifest)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert trainer(manifest)["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_trainer_holds_no_credentials_of_the_cluster() -> None:
    spec = pod()["spec"]
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)


@pytest.mark.fault(43)
def test_what_makes_the_pod_a_node_of_its_gang_wins_over_the_template() -> None:
    mine = pod(
        {
            "restartPolicy": "Always",
            "volumes": [{"name": "shared", "hostPath": {"path": "/"}}],
            "containers": [
                {
                    "name": "trainer",
                    "command": ["sh"],
                    "args": ["-c", "true"],
                    "terminationMessagePath": "/elsewhere",
                    "volumeMounts": [{"name": "tmp", "mountPath": "/mnt/shared"}],
                    "ports": [{"name": "mine", "containerPort": 9400}],
                }
            ],
        }
    )
    plain = pod()
    assert trainer(mine) == trainer(plain)
    assert mine["spec"]["restartPolicy"] == "Never"
    assert sorted(map(str, mine["spec"]["volumes"])) == sorted(map(str, plain["spec"]["volumes"]))


@pytest.mark.fault(43)
def test_labels_of_the_gang_cannot_be_taken_over() -> None:
    labels = {
        "training.ddpjob.io/attempt": "9",
        "training.ddpjob.io/uid": "other",
        "training.ddpjob.io/nodes": "9",
        "training.ddpjob.io/role": "initializer",
        "team": "vision",
    }
    job = make_job(podTemplate={"metadata": {"labels": labels, "annotations": {"a": "b"}}})
    metadata = build_pod(admitted(job), Place(2, 1, SERVICE))["metadata"]
    assert metadata["labels"] == {
        "team": "vision",
        "app.kubernetes.io/managed-by": "ddpjob",
        "training.ddpjob.io/job": "digits",
        "training.ddpjob.io/uid": UID,
        "training.ddpjob.io/attempt": "2",
        "training.ddpjob.io/node-rank": "1",
    }
    assert metadata["annotations"] == {"a": "b"}
    assert [owner["uid"] for owner in metadata["ownerReferences"]] == [UID]


def test_a_sidecar_is_kept_beside_the_trainer_with_every_port_it_has() -> None:
    containers = {item["name"]: item for item in pod({"containers": [SIDECAR]})["spec"]["containers"]}
    assert list(containers) == ["trainer", "logs"]
    assert containers["logs"] == SIDECAR


def test_ports_without_a_name_are_all_kept() -> None:
    ports = trainer(pod({"containers": [{"name": "trainer", "ports": [{"containerPort": 1}, {"containerPort": 2}]}]}))[
        "ports"
    ]
    assert [port["containerPort"] for port in ports] == [1, 2, 9400, 29500]


def test_a_variable_of_the_template_replaces_nothing_of_ours_and_is_replaced_whole() -> None:
    own = [
        {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NCCL_DEBUG", "value": "INFO"},
    ]
    variables = trainer(pod({"containers": [{"name": "trainer", "env": own}]}))["env"]
    assert [item for item in variables if item["name"] == "HOME"] == [{"name": "HOME", "value": "/tmp"}]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in variables


def test_a_volume_has_one_source() -> None:
    volumes = {item["name"]: item for item in pod(TEMPLATES["another /dev/shm"])["spec"]["volumes"]}
    assert volumes["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    mine = pod({"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "x"}}]})["spec"]["volumes"]
    assert {"name": "tmp", "persistentVolumeClaim": {"claimName": "x"}} in mine


def test_a_null_takes_a_default_away() -> None:
    context = pod(TEMPLATES["no user id"])["spec"]["securityContext"]
    assert "runAsUser" not in context
    assert context["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": [1]}, {"a": [2]}, {"a": [2]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": None}, {}),
        ({"volumes": [{"name": "a", "x": 1}]}, {"volumes": None}, {"volumes": [{"name": "a", "x": 1}]}),
        ({"volumes": [{"name": "a", "x": 1}]}, {"volumes": [{"name": "a"}]}, {"volumes": [{"name": "a"}]}),
        ({"containers": [{"name": "a", "x": 1}]}, {"containers": [{"name": "a", "y": 2}]},
         {"containers": [{"name": "a", "x": 1, "y": 2}]}),
    ],
)  # fmt: skip
def test_merging_goes_by_key_and_by_name(base: Manifest, over: Manifest, merged: Manifest) -> None:
    assert merge(base, over) == merged


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ({}, ["--module", "ddp_trainer.train", "--"]),
        ({"entrypoint": {"module": "mine.train"}}, ["--module", "mine.train", "--"]),
        ({"entrypoint": {"script": "/w/t.py"}, "args": ["--lr", "0.1"]}, ["--script", "/w/t.py", "--", "--lr", "0.1"]),
        ({"args": ["$(RANK)", "a$$b", "; rm -rf /", "$$(X)"]},
         ["--module", "ddp_trainer.train", "--", "$$(RANK)", "a$$$$b", "; rm -rf /", "$$$$(X)"]),
    ],
    ids=["the built-in trainer by default", "a module", "a script with arguments", "nothing is expanded or run"],
)  # fmt: skip
def test_arguments_reach_the_script_as_they_were_written(spec: dict[str, Any], arguments: list[str]) -> None:
    assert launch_args(make_job(**spec)) == arguments


@pytest.mark.fault(46)
@pytest.mark.parametrize("text", ["$(RANK)", "$$(RANK)", "$$$(RANK)", "$$", "a$b", "$", "$$$$(X)", "$(", "cost: 5$"])
def test_the_kubelet_hands_on_exactly_what_the_user_wrote(text: str) -> None:
    assert expand(launch_args(make_job(args=[text]))[-1], VARIABLES) == text
    assert expand(env(pod(env=[{"name": "X", "value": text}]))["X"], VARIABLES) == text


def test_the_environment_is_the_contracts() -> None:
    snapshots, stall = {"every": "100steps", "keep": 5}, {"minSeconds": 20, "maxSeconds": 600}
    assert env(pod(procsPerNode=4, snapshots=snapshots, stall=stall, env=[{"name": "HOME", "value": "/h"}])) == {
        "DDPJOB_NAME": "digits",
        "DDPJOB_NAMESPACE": "research",
        "DDPJOB_UID": UID,
        "DDPJOB_CREATED": "1767322745",
        "DDPJOB_ATTEMPT": "2",
        "DDPJOB_NODE_RANK": "1",
        "DDPJOB_NODES": "2",
        "DDPJOB_PROCS_PER_NODE": "4",
        "DDPJOB_RDZV_HOST": "10.96.0.7",
        "DDPJOB_RDZV_PORT": "29500",
        "DDPJOB_STATUS_PORT": "9400",
        "DDPJOB_SHARED": "/mnt/shared",
        "DDPJOB_RUN_DIR": "/dev/shm/ddpjob",
        "DDPJOB_SCRATCH": "/tmp",
        "DDPJOB_TERMINATION_LOG": "/dev/termination-log",
        "DDPJOB_KEEP_OUTPUT": "true",
        "DDPJOB_SNAPSHOT_EVERY": "100steps",
        "DDPJOB_SNAPSHOT_KEEP": "5",
        "DDPJOB_STALL_MIN_SECONDS": "20",
        "DDPJOB_STALL_MAX_SECONDS": "600",
        "DDPJOB_POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "DDPJOB_NODE_NAME": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        "POD_IP": {"fieldRef": {"fieldPath": "status.podIP"}},
        "PYTHONUNBUFFERED": "1",
        "HOME": "/h",
    }


def test_settings_that_are_not_the_default_are_variables_of_their_own() -> None:
    found = env(pod(nonFiniteLossPolicy="Rollback", snapshots={"keepEvery": 1000}, elastic={"minNodes": 1}))
    assert found["DDPJOB_ELASTIC_MIN_NODES"] == "1"
    assert found["DDPJOB_NON_FINITE_LOSS"] == "Rollback"
    assert found["DDPJOB_SNAPSHOT_KEEP_EVERY"] == "1000"


@pytest.mark.parametrize(
    "spec",
    [{"restart": {"scope": "InPlace"}}, {"restart": {"scope": "InPlace"}, "spares": 1}, {"elastic": {"minNodes": 1}}],
)
def test_a_pod_whose_place_may_change_reads_it_from_its_labels(spec: dict[str, Any]) -> None:
    manifest = pod(**spec)
    kubernetes_schemas.validate(manifest, SCHEMAS[-1], strict=True)
    (volume,) = (item for item in manifest["spec"]["volumes"] if item["name"] == "assignment")
    files = {item["path"]: item["fieldRef"]["fieldPath"] for item in volume["downwardAPI"]["items"]}
    read = {name: manifest["metadata"]["labels"][path.split("'")[1]] for name, path in files.items()}
    assert read == {"attempt": "2", "node-rank": "1", "nodes": "2"}
    mounts = {item["name"]: item["mountPath"] for item in trainer(manifest)["volumeMounts"]}
    assert env(manifest)["DDPJOB_ASSIGNMENT_DIR"] == mounts["assignment"]


def test_a_pod_whose_place_is_for_good_mounts_nothing_for_it() -> None:
    assert "DDPJOB_ASSIGNMENT_DIR" not in env(pod())
    assert "assignment" not in {item["name"] for item in pod()["spec"]["volumes"]}


CODE = {"configMaps": ["first", "second"], "sha256": "0" * 64, "requirements": "a$(HOME).txt"}


def test_submitted_code_is_mounted_in_parts() -> None:
    mine = {"volumes": [{"name": "ddpjob-code", "hostPath": {"path": "/"}}]}
    manifest = pod(mine, code=CODE)
    kubernetes_schemas.validate(manifest, SCHEMAS[-1], strict=True)
    (volume,) = (item for item in manifest["spec"]["volumes"] if item["name"] == "ddpjob-code")
    assert "hostPath" not in volume, "a volume of the template with this name is replaced"
    sources = [item["configMap"] for item in volume["projected"]["sources"]]
    assert [(item["name"], item["items"][0]["path"]) for item in sources] == [
        ("first", "00.tar.gz"),
        ("second", "01.tar.gz"),
    ]
    (mount,) = (item for item in trainer(manifest)["volumeMounts"] if item["name"] == "ddpjob-code")
    assert mount == {"name": "ddpjob-code", "mountPath": env(manifest)["DDPJOB_CODE_DIR"], "readOnly": True}
    assert env(manifest)["DDPJOB_CODE_SHA256"] == CODE["sha256"]
    assert env(manifest)["DDPJOB_CODE_REQUIREMENTS"] == "a$$(HOME).txt"


def test_a_job_without_code_mounts_none() -> None:
    assert not [name for name in env(pod()) if name.startswith("DDPJOB_CODE")]
    assert "ddpjob-code" not in {item["name"] for item in pod()["spec"]["volumes"]}


def test_a_spare_is_told_that_it_has_no_rank_and_how_large_the_gang_is() -> None:
    job = make_job(restart={"scope": "InPlace"}, spares=1)
    spare = build_pod(admitted(job), Place(2, None, SERVICE, "digits-2-s0", 3))
    assert spare["metadata"]["name"] == "digits-2-s0"
    assert spare["metadata"]["labels"]["training.ddpjob.io/node-rank"] == "none"
    assert (env(spare)["DDPJOB_NODE_RANK"], env(spare)["DDPJOB_NODES"]) == ("none", "3")


def test_the_image_is_the_jobs_or_the_operators() -> None:
    assert trainer(pod())["image"] == "registry.example/trainer:1"
    assert trainer(pod(image="mine:2"))["image"] == "mine:2"


def test_the_service_selects_node_rank_0_of_one_attempt_and_answers_before_it_is_ready() -> None:
    spec = build_service(admitted(make_job()), 2)["spec"]
    assert spec["publishNotReadyAddresses"] is True
    labels = pod(node_rank=0)["metadata"]["labels"]
    assert spec["selector"].items() <= labels.items()
    for other in (pod(node_rank=1), pod(node_rank=0, attempt=3)):
        assert not spec["selector"].items() <= other["metadata"]["labels"].items()


@pytest.mark.parametrize(("retain", "owners"), [(True, 0), (False, 1)])
def test_a_claim_that_is_retained_has_no_owner(retain: bool, owners: int) -> None:
    claim = build_pvc(admitted(make_job(shared={"retain": retain})))
    assert claim is not None
    assert len(claim["metadata"].get("ownerReferences", ())) == owners
    assert claim["spec"]["resources"] == {"requests": {"storage": "10Gi"}}
    assert "storageClassName" not in claim["spec"], "the cluster's default class"


@pytest.mark.parametrize(("image", "noted"), [("mine:1", "mine:1"), (None, "registry.example/trainer:1")])
def test_a_claim_says_which_image_reads_it_when_the_job_is_gone(image: str | None, noted: str) -> None:
    claim = build_pvc(admitted(make_job(image=image)))
    assert claim is not None
    assert claim["metadata"]["annotations"] == {"training.ddpjob.io/trainer-image": noted}


def test_the_users_own_claim_is_mounted_and_not_made() -> None:
    assert build_pvc(admitted(make_job(shared={"claimName": "mine"}))) is None
    volumes = pod(shared={"claimName": "mine"})["spec"]["volumes"]
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "mine"}} in volumes


def test_a_pod_of_the_gang_leaves_a_node_that_is_lost_in_the_time_that_the_job_says() -> None:
    """Also one that has not begun there, or whose sidecar has ended: no other sign tells of those."""
    seconds = {
        item["key"]: item.get("tolerationSeconds")
        for item in pod(restart={"nodeLostSeconds": 20})["spec"]["tolerations"]
        if item.get("effect") == "NoExecute"
    }
    assert seconds == {"node.kubernetes.io/not-ready": 20, "node.kubernetes.io/unreachable": 20}
