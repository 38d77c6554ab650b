"""What the operator may do is what it does: its roles against the audit log of all tests before this one."""

from __future__ import annotations

import pytest
from tests.cluster.audit import FORBID, Permission, audit_log, granted, requests
from tests.cluster.conftest import Operator, Unbroken
from tests.cluster.kube import Object
from tests.support.tiers import cannot_run

SELDOM_USED = {
    "get ddpjobs.training.ddpjob.io": "read again after a conflict",
    "get pods": "after a create that was refused because the name is taken",
    "get services": "the same",
    "get networkpolicies.networking.k8s.io": "the same",
    "get podgroups.scheduling.x-k8s.io": "the same",
    "get podgroups.scheduling.volcano.sh": "the same",
    "watch podgroups.scheduling.x-k8s.io": "where they are installed",
    "watch podgroups.scheduling.volcano.sh": "the same",
    "delete podgroups.scheduling.x-k8s.io": "of an attempt that is over, where they are installed",
    "delete podgroups.scheduling.volcano.sh": "the same",
    "create leases.coordination.k8s.io": "once per cluster: it outlives the release",
    "list events": "of a pod that does not start and does not say why",
    "patch events": "an event that repeats is counted up instead of made again",
}
"""Rights that only show in situations which no test here brings about, and why the operator has them."""


USING = {
    f"test_{name}" for name in ("training", "failures", "operator_dies", "deletion", "refusals", "in_place", "suspend")
}
"""Files of tests that between them bring about every other use of a right."""


@pytest.fixture
def asked(operator: Operator, unbroken: Unbroken) -> list[tuple[Permission, str, int]]:
    files = audit_log(operator.kubectl.kubeconfig)
    if not files:
        cannot_run("cluster", "the audit log of this cluster's API server cannot be read from here")
    return [(r.permission, r.decision, r.code) for r in requests(files, operator.user, operator.since)]


def test_nothing_that_the_operator_asked_for_was_forbidden(asked: list[tuple[Permission, str, int]]) -> None:
    assert {str(permission) for permission, decision, _ in asked if decision == FORBID} == set()


def test_the_operator_has_no_right_that_it_does_not_use(
    request: pytest.FixtureRequest, operator: Operator, asked: list[tuple[Permission, str, int]]
) -> None:
    files = {item.path.stem for item in request.session.items}
    if missing := sorted(USING - files):
        pytest.skip(f"only a run with {missing[0]} and the others makes the operator use all its rights")
    used = {permission for permission, _, _ in asked}
    unused = {str(permission) for permission in granted(roles_of(operator)) - used}
    assert unused - SELDOM_USED.keys() == set()


def roles_of(operator: Operator) -> list[Object]:
    """Every Role and ClusterRole that is bound to the operator's service account."""
    bindings = operator.kubectl.list("rolebindings,clusterrolebindings")
    subject = {"kind": "ServiceAccount", "name": operator.account, "namespace": operator.kubectl.namespace}
    roles = []
    for binding in bindings:
        if any(subject.items() <= found.items() for found in binding.get("subjects") or ()):
            role = operator.kubectl.get(binding["roleRef"]["kind"].lower(), binding["roleRef"]["name"])
            assert role is not None, f"{binding['metadata']['name']} binds a role that does not exist"
            roles.append(role)
    return roles
