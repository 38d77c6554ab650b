"""Pod specs that break, or keep, what an administrator requires: for the operator's own checks, and for the admission
policies of the chart that repeat them in CEL.
"""

from __future__ import annotations

from typing import Any

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
    return {"volumes": [{"name": "v", kind: SOURCES.get(kind, {})}]}


SOURCES: dict[str, dict[str, Any]] = {
    "awsElasticBlockStore": {"volumeID": "a"},
    "azureDisk": {"diskName": "a", "diskURI": "a"},
    "azureFile": {"secretName": "a", "shareName": "a"},
    "cephfs": {"monitors": ["a"]},
    "cinder": {"volumeID": "a"},
    "csi": {"driver": "a"},
    "flexVolume": {"driver": "a"},
    "gcePersistentDisk": {"pdName": "a"},
    "gitRepo": {"repository": "a"},
    "glusterfs": {"endpoints": "a", "path": "a"},
    "hostPath": {"path": "/"},
    "iscsi": {"iqn": "a", "lun": 0, "targetPortal": "a"},
    "nfs": {"server": "a", "path": "/"},
    "persistentVolumeClaim": {"claimName": "a"},
    "photonPersistentDisk": {"pdID": "a"},
    "portworxVolume": {"volumeID": "a"},
    "quobyte": {"registry": "a", "volume": "a"},
    "rbd": {"image": "a", "monitors": ["a"]},
    "scaleIO": {"gateway": "a", "secretRef": {}, "system": "a"},
    "vsphereVolume": {"volumePath": "a"},
}
"""What a volume of a kind must have."""


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
        *(container(**{probe: {kind: {"host": "169.254.169.254", "port": 80}}})
          for probe in ("livenessProbe", "readinessProbe", "startupProbe") for kind in ("httpGet", "tcpSocket")),
        *(container(lifecycle={hook: {kind: {"host": "127.0.0.1", "port": 80}}})
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

NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "serviceAccounts": ({"serviceAccountName": "admin"}, "admin"),
    "priorityClasses": ({"priorityClassName": "urgent"}, "urgent"),
    "schedulers": ({"schedulerName": "mine"}, "mine"),
    "runtimeClasses": ({"runtimeClassName": "kata"}, "kata"),
    "volumeTypes": ({"volumes": [{"name": "data", "nfs": {"server": "a", "path": "/"}}]}, "nfs"),
    "sharedScopes": ({"volumes": [{"name": "theirs", "persistentVolumeClaim": {"claimName": "theirs"}}]}, "Claim"),
    "tolerations": ({"tolerations": [{"key": "control-plane", "operator": "Exists"}]}, "control-plane"),
    "nodeNames": ({"nodeName": "node-1"}, "node-1"),
    "resourceClaims": ({"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "all"}]}, "all"),
}
