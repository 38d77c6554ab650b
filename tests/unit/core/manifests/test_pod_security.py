"""The Pod Security Standards, control by control: the cases of Kubernetes' own tests, and every pod that we make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import DEFAULTS, make_job
from looks import admitted
from tests.support.pod_specs import BAD_ANNOTATIONS, BROKEN, WITHIN, container, pod

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
