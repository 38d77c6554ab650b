"""The Pod Security Standards, control by control: the cases of Kubernetes' own tests, and every pod that we make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, make_job
from looks import admitted

from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pod_security import CONTROLS, pod_security_violations
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Bounds, PodSecurity
from ddpjob_operator.core.values.observed import ServiceView

PRIVILEGED, BASELINE, RESTRICTED = PodSecurity.PRIVILEGED, PodSecurity.BASELINE, PodSecurity.RESTRICTED
INITIALIZERS = [{"name": name, "source": "https://example.com/a", "path": name} for name in ("first", "second")]
CONTEXT = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
}


def pod(spec: dict[str, Any] | None = None, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod within the strictest profile, but for what the case says."""
    containers = [{"name": "a", "image": "a", "securityContext": CONTEXT}]
    return {"metadata": {"annotations": annotations or {}}, "spec": {"containers": containers} | (spec or {})}


def container(**fields: Any) -> dict[str, Any]:
    context = CONTEXT | fields.pop("securityContext", {})
    return {"containers": [{"name": "a", "image": "a", "securityContext": context} | fields]}


def context(**fields: Any) -> dict[str, Any]:
    return container(securityContext=fields)


def of_pod(**fields: Any) -> dict[str, Any]:
    return {"securityContext": fields}


def volume(kind: str) -> dict[str, Any]:
    return {"volumes": [{"name": "v", kind: {}}]}


def add(*names: str) -> dict[str, Any]:
    return context(capabilities={"drop": ["ALL"], "add": list(names)})


def sysctl(*names: str) -> dict[str, Any]:
    return of_pod(sysctls=[{"name": name, "value": "0"} for name in names])


BROKEN: dict[str, list[dict[str, Any]]] = {
    "baseline: HostProcess": [make(windowsOptions={"hostProcess": True}) for make in (of_pod, context)],
    "baseline: Host Namespaces": [{"hostNetwork": True}, {"hostPID": True}, {"hostIPC": True}],
    "baseline: Privileged Containers": [context(privileged=True)],
    "baseline: Capabilities": [add("NET_RAW"), add("ALL"), add("chown"), add("CAP_CHOWN"), add("IPC_LOCK", "CHOWN")],
    "baseline: HostPath Volumes": [volume("hostPath")],
    "baseline: Host Ports": [container(ports=[{"containerPort": 1}, {"containerPort": 2, "hostPort": 22}])],
    "baseline: Host Probes / Lifecycle Hooks": [
        *(container(**{probe: {kind: {"host": "169.254.169.254"}}})
          for probe in ("livenessProbe", "readinessProbe", "startupProbe") for kind in ("httpGet", "tcpSocket")),
        *(container(lifecycle={hook: {kind: {"host": "127.0.0.1"}}})
          for hook in ("postStart", "preStop") for kind in ("httpGet", "tcpSocket")),
    ],
    "baseline: AppArmor": [
        of_pod(appArmorProfile={"type": "Unconfined"}),
        context(appArmorProfile={"type": "Unconfined"}),
    ],
    "baseline: SELinux": [
        *(of_pod(seLinuxOptions={field: value}) for field, value in
          (("type", "spc_t"), ("type", "unconfined_t"), ("user", "root"), ("role", "sysadm_r"))),
        context(seLinuxOptions={"type": "spc_t"}),
    ],
    "baseline: /proc Mount Type": [context(procMount="Unmasked"), context(procMount="other")],
    "baseline: Seccomp": [
        of_pod(seccompProfile={"type": "Unconfined"}),
        context(seccompProfile={"type": "Unconfined"}),
        context(seccompProfile={"type": "other"}),
    ],
    "baseline: Sysctls": [
        sysctl("kernel.msgmax"), sysctl("net.ipv4.ip_local_port_range", "net.core.somaxconn"), sysctl(""),
    ],
    "restricted: Volume Types": [
        volume(kind)
        for kind in ("gcePersistentDisk", "awsElasticBlockStore", "gitRepo", "nfs", "iscsi", "glusterfs", "rbd",
                     "flexVolume", "cinder", "cephfs", "flocker", "fc", "azureFile", "vsphereVolume", "quobyte",
                     "azureDisk", "portworxVolume", "scaleIO", "storageos", "photonPersistentDisk", "unknown")
    ] + [{"volumes": [{"name": "of no kind"}]}],
    "restricted: Privilege Escalation": [
        context(allowPrivilegeEscalation=True), context(allowPrivilegeEscalation=None),
        {"containers": [{"name": "a", "securityContext": {key: CONTEXT[key] for key in CONTEXT if key[0] != "a"}}]},
    ],
    "restricted: Running as Non-root": [
        context(runAsNonRoot=None), context(runAsNonRoot=False),
        of_pod(runAsNonRoot=False), of_pod(runAsNonRoot=True) | context(runAsNonRoot=False),
    ],
    "restricted: Running as Non-root user": [of_pod(runAsUser=0), context(runAsUser=0)],
    "restricted: Seccomp": [context(seccompProfile=None), context(seccompProfile={})],
    "restricted: Capabilities": [
        context(capabilities=None), context(capabilities={"drop": ["NET_RAW"]}), context(capabilities={"drop": []}),
        add("CHOWN"), add("NET_BIND_SERVICE", "SYS_CHROOT"),
    ],
}  # fmt: skip

WITHIN = [
    {},
    of_pod(windowsOptions={"hostProcess": False}),
    {"hostNetwork": False, "hostPID": None},
    context(privileged=False),
    add("NET_BIND_SERVICE"),
    *map(volume, ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
                  "projected", "secret")),
    container(ports=[{"containerPort": 1, "hostPort": 0}]),
    container(livenessProbe={"httpGet": {"host": "", "port": 1}}, lifecycle={"preStop": {"exec": {"command": ["a"]}}}),
    *(of_pod(appArmorProfile={"type": kind}) for kind in ("RuntimeDefault", "Localhost")),
    *(of_pod(seLinuxOptions={"type": kind, "level": "s0"})
      for kind in ("container_t", "container_init_t", "container_kvm_t", "container_engine_t", "")),
    context(procMount="Default"),
    of_pod(seccompProfile={"type": "Localhost"}) | context(seccompProfile=None),
    of_pod(runAsNonRoot=True) | context(runAsNonRoot=None),
    sysctl("kernel.shm_rmid_forced", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.tcp_wmem"),
    of_pod(runAsUser=1),
]  # fmt: skip

BAD_ANNOTATIONS = {
    "container.apparmor.security.beta.kubernetes.io/a": "unconfined",
    "container.seccomp.security.alpha.kubernetes.io/a": "unconfined",
    "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
}


def cases() -> list[Any]:
    return [pytest.param(row, spec, id=f"{row}-{index}") for row in BROKEN for index, spec in enumerate(BROKEN[row])]


def test_every_control_of_the_standard_has_cases() -> None:
    assert list(BROKEN) == [f"{control.level}: {control.name}" for control in CONTROLS]


@pytest.mark.parametrize(("row", "spec"), cases())
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_control_is_broken(row: str, spec: dict[str, Any], kind: str) -> None:
    level, _, name = row.partition(": ")
    if kind == "initContainers" and "containers" in spec:
        spec = {**pod()["spec"], **{key: value for key, value in spec.items() if key != "containers"},
                "initContainers": spec["containers"]}  # fmt: skip
    found = [said for _, said in pod_security_violations(pod(spec), PodSecurity(level))]
    assert any(said.endswith(f"({name})") for said in found), found
    assert list(pod_security_violations(pod(spec), PRIVILEGED)) == []
    if level == BASELINE:
        assert list(pod_security_violations(pod(spec), RESTRICTED)), "each profile includes the one before it"


@pytest.mark.parametrize("spec", WITHIN, ids=str)
def test_what_the_standard_allows_is_allowed(spec: dict[str, Any]) -> None:
    assert list(pod_security_violations(pod(spec), RESTRICTED)) == []
    assert list(pod_security_violations(pod(spec), BASELINE)) == []


@pytest.mark.parametrize("name", BAD_ANNOTATIONS)
def test_annotations_of_older_servers_are_read(name: str) -> None:
    ((field, _),) = pod_security_violations(pod(annotations={name: BAD_ANNOTATIONS[name]}), BASELINE)
    assert field == f"spec.podTemplate.metadata.annotations[{name}]"
    for value in ("runtime/default", "localhost/mine"):
        assert list(pod_security_violations(pod(annotations={name: value}), BASELINE)) == []


def test_the_nodes_network_may_be_allowed_by_itself() -> None:
    spec = {"hostNetwork": True} | container(ports=[{"containerPort": 1, "hostPort": 1}])
    assert len(list(pod_security_violations(pod(spec), RESTRICTED))) == 2
    assert list(pod_security_violations(pod(spec), RESTRICTED, host_network=True)) == []
    assert len(list(pod_security_violations(pod(spec | {"hostPID": True}), RESTRICTED, host_network=True))) == 1


def test_every_pod_that_we_make_is_within_the_strictest_profile() -> None:
    job = make_job(spares=1, restart={"scope": "InPlace"}, initializers=INITIALIZERS)
    ready = admitted(job, replace(DEFAULTS, bounds=Bounds(pod_security=RESTRICTED)))
    service = ServiceView("10.96.0.7", 0)
    made = [
        build_pod(ready, Place(0, 0, service)),
        build_pod(ready, Place(0, None, service, name="digits-0-s0")),
        build_initializer(ready, 0),
    ]
    assert [list(pod_security_violations(item, RESTRICTED)) for item in made] == [[], [], []]


@pytest.mark.parametrize("level", [BASELINE, RESTRICTED])
def test_a_job_that_breaks_the_profile_is_refused_with_field_and_control(level: PodSecurity) -> None:
    escaping = {"name": "trainer", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}
    job = make_job(podTemplate={"spec": {"containers": [escaping]}})
    found = admit(job, replace(DEFAULTS, bounds=Bounds(pod_security=level)))
    assert isinstance(found, Refused)
    assert found.problems[0] == (
        "spec.podTemplate.spec.containers[trainer].securityContext.capabilities.add: ['SYS_ADMIN'] (Capabilities) "
        f"breaks the Pod Security Standard {level}, which this cluster's administrator requires in namespace research "
        "(bounds.podSecurity); change it"
    )


def test_the_pod_of_the_initializers_is_held_to_it() -> None:
    """What the template says of the pod goes into that one too."""
    job = make_job(initializers=INITIALIZERS, podTemplate={"spec": {"securityContext": {"runAsUser": 0}}})
    ready = admitted(job)
    found = list(pod_security_violations(build_initializer(ready, 0), RESTRICTED))
    assert [field for field, _ in found] == ["spec.podTemplate.spec.securityContext.runAsUser"]
