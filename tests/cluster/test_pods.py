"""What runs: no more rights than the restricted Pod Security profile gives, and no more software than each part needs.

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import Operator, Unbroken
from tests.cluster.installation import wait_operator
from tests.cluster.kube import Kubectl, Object

ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
HAS = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"


def test_trainer_pods_keep_to_the_restricted_profile(unbroken: Unbroken) -> None:
    assert [list(violations(pod)) for pod in unbroken.pods] == [[], []]


def test_the_operators_pod_keeps_to_the_restricted_profile(operator: Operator) -> None:
    pod = operator.kubectl.get("pod", wait_operator(operator.kubectl))
    assert pod is not None
    assert list(violations(pod)) == []


def test_root_file_systems_are_read_only(operator: Operator, unbroken: Unbroken) -> None:
    running = operator.kubectl.get("pod", wait_operator(operator.kubectl))
    assert running is not None
    for pod in (running, *unbroken.pods):
        assert [c["securityContext"].get("readOnlyRootFilesystem") for c in pod["spec"]["containers"]] == [True]


def test_trainer_pods_hold_no_credentials_for_the_cluster(unbroken: Unbroken) -> None:
    for pod in unbroken.pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert [list(volume) for volume in pod["spec"]["volumes"] if "secret" in volume or "projected" in volume] == []


@pytest.mark.parametrize(
    ("where", "needs", "lacks"),
    [
        ("operator", ["kopf", "ddpjob_operator"], ["torch", "ddp_trainer"]),
        ("trainer", ["torch", "ddp_trainer"], ["kopf", "kubernetes", "ddpjob_operator"]),
    ],
)
def test_an_image_holds_its_own_part_alone(
    operator: Operator, unbroken: Unbroken, where: str, needs: list[str], lacks: list[str]
) -> None:
    kubectl, pod = _inside(where, operator, unbroken)
    assert kubectl.python(pod, HAS, *needs, *lacks).split() == needs


def _inside(where: str, operator: Operator, unbroken: Unbroken) -> tuple[Kubectl, str]:
    """A running pod of one of the images."""
    if where == "operator":
        return operator.kubectl, wait_operator(operator.kubectl)
    return unbroken.scenario.kubectl, unbroken.scenario.reader


def violations(pod: Object) -> Iterator[str]:
    """What the restricted profile would refuse of a pod."""
    spec = pod["spec"]
    of_pod = spec.get("securityContext") or {}
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for volume in spec.get("volumes") or ():
        if not (volume.keys() - {"name"}) <= ALLOWED_VOLUMES:
            yield f"volume {volume['name']}: {sorted(volume.keys() - {'name'})}"
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        for what in _of_container(container, of_pod):
            yield f"container {container['name']}: {what}"


def _of_container(container: dict[str, Any], of_pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    both = of_pod | own
    capabilities = own.get("capabilities") or {}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may escalate its privileges"
    if "ALL" not in (capabilities.get("drop") or ()):
        yield "does not drop ALL capabilities"
    if not set(capabilities.get("add") or ()) <= {"NET_BIND_SERVICE"}:
        yield f"adds capabilities {capabilities['add']}"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "may run as root"
    if (both.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    if own.get("procMount", "Default") != "Default":
        yield f"procMount {own['procMount']}"
    if any(port.get("hostPort") for port in container.get("ports") or ()):
        yield "takes a port of its node"
