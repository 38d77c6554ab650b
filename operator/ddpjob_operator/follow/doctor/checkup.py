"""All checks, in the order in which a job meets what they look at."""

from __future__ import annotations

from ddpjob_operator.follow.doctor.admission import admission
from ddpjob_operator.follow.doctor.facts import Facts
from ddpjob_operator.follow.doctor.findings import Finding
from ddpjob_operator.follow.doctor.namespace import limits, pod_security, quota
from ddpjob_operator.follow.doctor.nodes import clock, gpus, image, nodes
from ddpjob_operator.follow.doctor.operator import api, operator, rights
from ddpjob_operator.follow.doctor.policies import mesh, network, webhooks
from ddpjob_operator.follow.doctor.storage import storage

CHECKS = (
    api, rights, operator, webhooks, admission, pod_security, quota, limits, storage, nodes, gpus, image, network,
    mesh, clock,
)  # fmt: skip


def examine(facts: Facts) -> tuple[Finding, ...]:
    """What would stop a job of the caller in the namespace, one finding for each check."""
    return tuple(check(facts) for check in CHECKS)
