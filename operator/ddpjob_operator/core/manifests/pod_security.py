"""The Pod Security Standards, checked on a pod before it is created.

Where the API server enforces them itself (Pod Security Admission, Kubernetes 1.25), it does so by the labels of a
namespace, which its administrator may have left out; older ones do not at all. `CONTROLS` follows the table of
https://kubernetes.io/docs/concepts/security/pod-security-standards/ as of Kubernetes 1.36, in its order. Exceptions for
Windows and for user namespaces are left out: no pod of a gang needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ddpjob_operator.core.values.job import Manifest, PodSecurity

TEMPLATE = "spec.podTemplate"

Found = Iterator[tuple[str, Any]]
"""Fields that break a control, with their values; None where a field is missing."""


class Control(NamedTuple):
    """One row of the standard."""

    level: PodSecurity
    name: str
    violations: Callable[[Manifest], Found]


def pod_security_violations(pod: Manifest, level: PodSecurity, host_network: bool = False) -> Iterator[tuple[str, str]]:
    """Each field of a pod that breaks a control of `level`, and what is wrong with it.

    With `host_network`, the network of the node and its ports are allowed nevertheless.
    """
    for control in CONTROLS:
        if level is PodSecurity.PRIVILEGED or (control.level, level) == (PodSecurity.RESTRICTED, PodSecurity.BASELINE):
            continue
        for field, value in control.violations(pod):
            if host_network and (field.endswith(".hostPort") or field in HOST_NETWORK):
                continue
            yield field, f"{'is not set' if value is None else _short(value)} ({control.name})"


HOST_NETWORK = (f"{TEMPLATE}.spec.hostNetwork",)

_CAPABILITIES = frozenset(
    ("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
     "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT")
)  # fmt: skip
_SYSCTLS = frozenset(
    ("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
     "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
     "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
     "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem")
)  # fmt: skip
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_PROFILES = ("RuntimeDefault", "Localhost")
_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected",
     "secret")
)  # fmt: skip
_ANNOTATED = {
    "container.apparmor.security.beta.kubernetes.io/": ("", "runtime/default"),
    "container.seccomp.security.alpha.kubernetes.io/": ("runtime/default", "docker/default"),
    "seccomp.security.alpha.kubernetes.io/pod": ("runtime/default", "docker/default"),
}
"""Annotations that an older API server takes for the fields that replaced them. `localhost/…` is allowed, too."""


def _host_process(pod: Manifest) -> Found:
    for place, context in _contexts(pod):
        yield from _where(f"{place}.windowsOptions.hostProcess", _object(context.get("windowsOptions")), bool)


def _host_namespaces(pod: Manifest) -> Found:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        yield from _where(f"{TEMPLATE}.spec.{name}", pod["spec"], bool)


def _privileged(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        yield from _where(f"{place}.securityContext.privileged", _object(container.get("securityContext")), bool)


def _added_capabilities(pod: Manifest, allowed: frozenset[str] = _CAPABILITIES) -> Found:
    for place, container in _containers(pod):
        added = _object(_object(container.get("securityContext")).get("capabilities")).get("add")
        if beyond := [name for name in _list(added) if name not in allowed]:
            yield f"{place}.securityContext.capabilities.add", beyond


def _host_path(pod: Manifest) -> Found:
    for place, volume in _volumes(pod):
        if volume.get("hostPath") is not None:
            yield f"{place}.hostPath", volume["hostPath"]


def _host_ports(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        for port in _objects(container.get("ports")):
            yield from _where(f"{place}.ports.hostPort", port, bool)


def _probed_hosts(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        hooks = _object(container.get("lifecycle"))
        asked = {name: container.get(name) for name in ("livenessProbe", "readinessProbe", "startupProbe")}
        asked |= {f"lifecycle.{name}": hooks.get(name) for name in ("postStart", "preStop")}
        for name, handler in asked.items():
            for kind in ("httpGet", "tcpSocket"):
                yield from _where(f"{place}.{name}.{kind}.host", _object(_object(handler).get(kind)), bool)


def _apparmor(pod: Manifest) -> Found:
    yield from _annotations(pod, "container.apparmor")
    for place, context in _contexts(pod):
        profile = _object(context.get("appArmorProfile"))
        yield from _where(f"{place}.appArmorProfile.type", profile, lambda kind: kind not in (None, "", *_PROFILES))


def _selinux(pod: Manifest) -> Found:
    for place, context in _contexts(pod):
        options, path = _object(context.get("seLinuxOptions")), f"{place}.seLinuxOptions"
        yield from _where(f"{path}.type", options, lambda kind: kind is not None and kind not in _SELINUX_TYPES)
        yield from _where(f"{path}.user", options, bool)
        yield from _where(f"{path}.role", options, bool)


def _proc_mount(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        context = _object(container.get("securityContext"))
        yield from _where(f"{place}.securityContext.procMount", context, lambda kind: kind not in (None, "", "Default"))


def _seccomp(pod: Manifest) -> Found:
    yield from _annotations(pod, "seccomp", "container.seccomp")
    for place, context in _contexts(pod):
        profile = _object(context.get("seccompProfile"))
        yield from _where(f"{place}.seccompProfile.type", profile, lambda kind: kind not in (None, *_PROFILES))


def _sysctls(pod: Manifest) -> Found:
    context = _object(pod["spec"].get("securityContext"))
    beyond = [item.get("name") for item in _objects(context.get("sysctls")) if item.get("name") not in _SYSCTLS]
    if beyond:
        yield f"{TEMPLATE}.spec.securityContext.sysctls", beyond


def _volume_types(pod: Manifest) -> Found:
    for place, volume in _volumes(pod):
        kinds = volume_types(volume)
        if not kinds or not kinds <= _VOLUMES:
            yield place, sorted(kinds - _VOLUMES) or None


def _escalation(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        found = _object(container.get("securityContext")).get("allowPrivilegeEscalation")
        if found is not False:
            yield f"{place}.securityContext.allowPrivilegeEscalation", found


def _non_root(pod: Manifest) -> Found:
    yield from _set_for_all(pod, "runAsNonRoot", lambda value: value, lambda value: value is True)


def _root_user(pod: Manifest) -> Found:
    for place, context in _contexts(pod):
        if context.get("runAsUser") == 0:
            yield f"{place}.runAsUser", 0


def _seccomp_set(pod: Manifest) -> Found:
    kind = "seccompProfile"
    yield from _set_for_all(pod, kind, lambda value: _object(value).get("type"), lambda value: value in _PROFILES)


def _dropped_capabilities(pod: Manifest) -> Found:
    for place, container in _containers(pod):
        dropped = _object(_object(container.get("securityContext")).get("capabilities")).get("drop")
        if "ALL" not in _list(dropped):
            yield f"{place}.securityContext.capabilities.drop", dropped
    yield from _added_capabilities(pod, frozenset(("NET_BIND_SERVICE",)))


_BASELINE, _RESTRICTED = PodSecurity.BASELINE, PodSecurity.RESTRICTED

CONTROLS = (
    Control(_BASELINE, "HostProcess", _host_process),
    Control(_BASELINE, "Host Namespaces", _host_namespaces),
    Control(_BASELINE, "Privileged Containers", _privileged),
    Control(_BASELINE, "Capabilities", _added_capabilities),
    Control(_BASELINE, "HostPath Volumes", _host_path),
    Control(_BASELINE, "Host Ports", _host_ports),
    Control(_BASELINE, "Host Probes / Lifecycle Hooks", _probed_hosts),
    Control(_BASELINE, "AppArmor", _apparmor),
    Control(_BASELINE, "SELinux", _selinux),
    Control(_BASELINE, "/proc Mount Type", _proc_mount),
    Control(_BASELINE, "Seccomp", _seccomp),
    Control(_BASELINE, "Sysctls", _sysctls),
    Control(_RESTRICTED, "Volume Types", _volume_types),
    Control(_RESTRICTED, "Privilege Escalation", _escalation),
    Control(_RESTRICTED, "Running as Non-root", _non_root),
    Control(_RESTRICTED, "Running as Non-root user", _root_user),
    Control(_RESTRICTED, "Seccomp", _seccomp_set),
    Control(_RESTRICTED, "Capabilities", _dropped_capabilities),
)


def volume_types(volume: Manifest) -> frozenset[str]:
    """The sources of a volume, of which a valid one has exactly one."""
    return frozenset(key for key, value in volume.items() if key != "name" and value is not None)


def _set_for_all(pod: Manifest, field: str, read: Callable[[Any], Any], good: Callable[[Any], bool]) -> Found:
    """A field that every container has well, itself or from its pod. Where it is set badly it is said at its place."""
    of_pod = read(_object(pod["spec"].get("securityContext")).get(field))
    if of_pod is not None and not good(of_pod):
        yield f"{TEMPLATE}.spec.securityContext.{field}", of_pod
    for place, container in _containers(pod):
        own = read(_object(container.get("securityContext")).get(field))
        if (own is None and of_pod is None) or (own is not None and not good(own)):
            yield f"{place}.securityContext.{field}", own


def _annotations(pod: Manifest, *families: str) -> Found:
    given: Mapping[str, Any] = pod["metadata"].get("annotations") or {}
    for name, value in given.items():
        for prefix, allowed in _ANNOTATED.items():
            if not prefix.startswith(families) or not name.startswith(prefix):
                continue
            if value not in allowed and not str(value).startswith("localhost/"):
                yield f"{TEMPLATE}.metadata.annotations[{name}]", value


def _contexts(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    """The security contexts of the pod and of each container."""
    yield f"{TEMPLATE}.spec.securityContext", _object(pod["spec"].get("securityContext"))
    for place, container in _containers(pod):
        yield f"{place}.securityContext", _object(container.get("securityContext"))


def _containers(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in _objects(pod["spec"].get(kind)):
            yield f"{TEMPLATE}.spec.{kind}[{container.get('name')}]", container


def _volumes(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    for volume in _objects(pod["spec"].get("volumes")):
        yield f"{TEMPLATE}.spec.volumes[{volume.get('name')}]", volume


def _where(path: str, parent: Manifest, bad: Callable[[Any], bool]) -> Found:
    """The field at the end of `path`, if its value is bad."""
    value = parent.get(path.rpartition(".")[2])
    if bad(value):
        yield path, value


def _object(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: Any) -> Iterator[Manifest]:
    yield from (item for item in _list(value) if isinstance(item, dict))


def _short(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
