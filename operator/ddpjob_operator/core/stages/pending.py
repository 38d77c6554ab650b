"""Pending: what a job has before its first pod, which is the address of its rendezvous, its volume, and whatever else
its pods rely on.

A NetworkPolicy that comes after the pods would leave them open for a moment, and a PodGroup that does would leave
them to be scheduled one by one. All of it is made at once; the API server's refusal of any holds the job back.
"""

from __future__ import annotations

from ddpjob_operator.core import transitions
from ddpjob_operator.core.gang.children import create_service, missing_children
from ddpjob_operator.core.gang.problems import startup_problem
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.stages.finished import plan_refused
from ddpjob_operator.core.stages.starting import plan_starting
from ddpjob_operator.core.values.actions import Action, Plan
from ddpjob_operator.core.values.look import Look


def plan_pending(look: Look) -> Plan:
    """Check the bounds, create what is missing, and start the gang once everything is there."""
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return plan_refused(look, admitted)
    actions = _missing(look, admitted)
    if not actions:
        return plan_starting(look)
    if (problem := startup_problem(look, ())) is not None:
        look = transitions.degrade(transitions.begin(look), problem)
    return Plan(look.status, actions)


def _missing(look: Look, admitted: Admitted) -> tuple[Action, ...]:
    missing = missing_children(look, admitted)
    return missing if look.observed.service is not None else (create_service(look, admitted), *missing)
