"""What a pod asks of its node beyond a place to run. All of it lies outside the job's namespace.

Whoever may create a DDPJob has the operator create its pods, so the operator must not grant more than the
administrator does: `bounds.hostAccess`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpjob_operator.core.model import HostAccess, Manifest

_NAMESPACES = ("hostPID", "hostIPC")
_TEMPLATE = "spec.podTemplate.spec"


def beyond_host_access(pod: Manifest, allowed: HostAccess) -> Iterator[str]:
    """Fields of `pod` that reach further into its node than is allowed."""
    spec = pod["spec"]
    if allowed is HostAccess.NONE:
        if spec.get("hostNetwork"):
            yield f"hostNetwork in spec.placement or {_TEMPLATE}"
        for place, container in _containers(spec):
            if any(port.get("hostPort") for port in _objects(container.get("ports"))):
                yield f"{place}.ports.hostPort"
    if allowed is HostAccess.ALL:
        return
    yield from (f"{_TEMPLATE}.{name}" for name in _NAMESPACES if spec.get(name))
    for volume in _objects(spec.get("volumes")):
        if volume.get("hostPath") is not None:
            yield f"{_TEMPLATE}.volumes[{volume.get('name')}].hostPath"
    for place, container in _containers(spec):
        if _is_privileged(container):
            yield f"{place}.securityContext.privileged"


def _containers(spec: Manifest) -> Iterator[tuple[str, Manifest]]:
    for kind in ("containers", "initContainers"):
        for container in _objects(spec.get(kind)):
            yield f"{_TEMPLATE}.{kind}[{container.get('name')}]", container


def _is_privileged(container: Manifest) -> bool:
    context = container.get("securityContext")
    return bool(isinstance(context, dict) and context.get("privileged"))


def _objects(value: Any) -> Iterator[Manifest]:
    yield from (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
