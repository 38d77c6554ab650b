"""What the pods have in common that a person starts beside a job: `ddpjob snapshots` and `ddpjob debug`.

They are no part of the gang: they have neither the labels nor the controller by which the operator knows its pods, and
by which the job's Service and NetworkPolicy select them. The job owns them, so that they go with it if the command
could not delete them.
"""

from __future__ import annotations

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import LABEL_ROLE, dns_label

LEAST = {"cpu": "100m", "memory": "256Mi"}
"""What such a pod requests. Namespaces with a quota refuse pods that name nothing."""


def short_lived_metadata(job: Job, role: str) -> Manifest:
    """Of a pod with this role, which is also in its name."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return {
        "generateName": f"{dns_label(job.name, 63 - len(f'-{role}-12345'))}-{role}-",
        "namespace": job.namespace,
        "labels": {LABEL_ROLE: role},
        "ownerReferences": [owner],
    }
