"""What the pods have in common that a person starts beside a job: `ddpjob snapshots`, `logs` and `debug`.

They are no part of the gang: they have neither the labels nor the controller by which the operator knows its pods, and
by which the job's Service and NetworkPolicy select them. The job owns them, so that they go with it if the command
could not delete them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.pod import PodTemplate
from ddpjob_operator.core.manifests.placement import REQUIRED
from ddpjob_operator.core.manifests.pods import users_annotations, users_labels, without_gang, without_networks
from ddpjob_operator.core.values.job import Job, Manifest
from ddpjob_operator.core.values.names import KUEUE_DOMAIN, LABEL_ROLE, dns_label

LEAST = {"cpu": "100m", "memory": "256Mi"}
"""What such a pod requests. Namespaces with a quota refuse pods that name nothing."""


def short_lived_metadata(job: Job, role: str, container: str, *, devices: bool = False) -> Manifest:
    """Of a pod with this role, which is also in its name, and one container; with or without the gang's `devices`.

    It has the labels and annotations of the podTemplate: those say to webhooks what to inject and what not, and
    policies may ask for them. A queue is not for it, nor a gang, nor what keeps the pods of the gang apart, nor,
    without devices, the networks of the ranks.
    """
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    metadata, template = _metadata(job.namespace, role, owner), job.spec.pod_template
    given = without_gang(template, users_labels(template)).items()
    apart = _keep_apart(template)
    labels = {name: value for name, value in given if not (name.startswith(f"{KUEUE_DOMAIN}/") or name in apart)}
    annotations = without_gang(template, users_annotations(template, container))
    annotations = annotations if devices else without_networks(annotations)
    return metadata | {"labels": labels | metadata["labels"]} | ({"annotations": annotations} if annotations else {})


def _keep_apart(template: PodTemplate | None) -> frozenset[str]:
    """Labels by which pods of the gang keep away from each other: this pod is to fit beside them."""
    spec = (template.spec if template else None) or {}
    anti = (spec.get("affinity") or {}).get("podAntiAffinity") or {}
    terms = (*(anti.get(REQUIRED) or ()), *(spec.get("topologySpreadConstraints") or ()))
    selectors = [term.get("labelSelector") or {} for term in terms]
    named = {name for one in selectors for name in one.get("matchLabels") or ()}
    return frozenset(named | {item["key"] for one in selectors for item in one.get("matchExpressions") or ()})


def claim_metadata(claim: Mapping[str, Any], role: str) -> Manifest:
    """The same for a job that is gone: the claim, of which this is the metadata, owns the pod."""
    owner = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": claim["name"], "uid": claim["uid"]}
    return _metadata(claim["namespace"], role, owner)


def _metadata(namespace: str, role: str, owner: Manifest) -> Manifest:
    return {
        "generateName": f"{dns_label(owner['name'], 63 - len(f'-{role}-12345'))}-{role}-",
        "namespace": namespace,
        "labels": {LABEL_ROLE: role},
        "ownerReferences": [owner | {"controller": False, "blockOwnerDeletion": False}],
    }
