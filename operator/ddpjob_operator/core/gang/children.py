"""What protects and groups a gang: its NetworkPolicies and its PodGroup, made before its pods and kept while it lasts.

Without its policies a job's ports are open, and nobody would notice: one that was deleted is made again in any phase.
No watch reports these objects; the edge forgets with each of its periodic lists which of them it knows to be there.
"""

from __future__ import annotations

from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.network_policy import build_policies
from ddpjob_operator.core.manifests.pod_group import build_pod_group
from ddpjob_operator.core.values.actions import CreateChild
from ddpjob_operator.core.values.look import Look

COSCHEDULING, VOLCANO = "Coscheduling", "Volcano"


def missing_children(look: Look, admitted: Admitted) -> tuple[CreateChild, ...]:
    """Create the policies and the group that the job is to have and that are not known to be there."""
    children = (child for child in (*build_policies(admitted), build_pod_group(admitted)) if child is not None)
    known = look.observed.children
    return tuple(CreateChild(child) for child in children if (child["kind"], child["metadata"]["name"]) not in known)


def lost_children(look: Look) -> tuple[CreateChild, ...]:
    """The same for a job that has its pods."""
    if look.defaults.network is None and look.job.spec.scheduling.gang not in (COSCHEDULING, VOLCANO):
        return ()
    admitted = admission(look)
    return () if isinstance(admitted, Refused) else missing_children(look, admitted)
