"""Names and labels of all that a job owns: deterministic, so that a repeated create is recognised; never colliding.

A pod's name always ends in the attempt and the node rank that it was made for, a spare's in the attempt and `s0`, `s1`
and so on, and that of initializers in `init` and a number, so that the names of two jobs' pods differ whenever the
jobs' names do. Its labels say what it is now: a pod that is kept for a later attempt
keeps its name. A job's name that is too long for a label, or that a DNS label does not allow, is shortened and
gets a hash of the whole.
"""

from __future__ import annotations

import hashlib
import re

DOMAIN = "training.ddpjob.io"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "ddpjob"
LABEL_JOB = f"{DOMAIN}/job"
LABEL_UID = f"{DOMAIN}/uid"
LABEL_ATTEMPT = f"{DOMAIN}/attempt"
LABEL_NODE_RANK = f"{DOMAIN}/node-rank"
LABEL_NODES = f"{DOMAIN}/nodes"
"""Size of the gang. Only on pods that read their place in it from their labels."""

LABEL_SYNC = f"{DOMAIN}/sync"
"""Changed only so that the kubelet syncs the pod."""

FINALIZER = f"{DOMAIN}/job-tracking"
"""Keeps a pod of a gang visible until its end is on record. Named after that of batch/v1 Jobs (KEP-2307)."""

SPARE = "none"
"""The node rank of a pod that waits for one."""

LABEL_GROUP = f"{DOMAIN}/group"
"""The group in which the gang is admitted. Each scheduler has a label or an annotation of its own besides."""

KUEUE_DOMAIN = "kueue.x-k8s.io"
KUEUE_GROUP = f"{KUEUE_DOMAIN}/pod-group-name"

LABEL_ROLE = f"{DOMAIN}/role"
INITIALIZER = "initializer"
"""The role of the pod that runs the initializers; pods of the gang have none."""

LABEL_LAST_INITIALIZER = f"{DOMAIN}/last-initializer"
"""The main container of that pod. Webhooks may inject others, which run on when it is done."""

TRAINER_CONTAINER = "trainer"

ANNOTATION_IMAGE = f"{DOMAIN}/trainer-image"
"""Of a claim: the image of the job that it was made for, with which the volume can be read when the job is gone."""

ANNOTATION_USER = f"{DOMAIN}/run-as"
"""Of a claim: the user and groups that the podTemplate of that job asks for, as JSON. The volume is read as them."""

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_SUFFIX = len("-999999-1023")


def dns_label(name: str, limit: int = 63) -> str:
    """`name` as a DNS label (RFC 1035) of at most `limit` characters; itself where that is possible."""
    if len(name) <= limit and _DNS_LABEL.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    stem = re.sub(r"[^-a-z0-9]", "-", name.lower())
    if not stem[:1].isalpha():
        stem = f"j-{stem}"
    return f"{stem[: limit - 9].rstrip('-')}-{digest}"


def pod_name(job: str, attempt: int, node_rank: int) -> str:
    """Name of one node of the gang."""
    return f"{dns_label(job, 63 - _LONGEST_SUFFIX)}-{attempt}-{node_rank}"


def spare_name(job: str, attempt: int, index: int) -> str:
    """Name of a pod that was made to wait for a node rank."""
    return f"{dns_label(job, 63 - _LONGEST_SUFFIX)}-{attempt}-s{index}"


def initializer_name(job: str, number: int) -> str:
    """Name of the pod that runs the initializers for the nth time, from 0."""
    return f"{dns_label(job, 63 - _LONGEST_SUFFIX)}-init-{number}"


def group_name(job: str, uid: str, attempt: int) -> str:
    """Name of the group in which a gang is admitted. What is left of earlier attempts, or of a deleted job of the same
    name, is another group.
    """
    digest = hashlib.sha256(uid.encode()).hexdigest()[:8]
    return f"{dns_label(job, 63 - len(f'-{digest}-999999'))}-{digest}-{attempt}"


def policy_name(job: str) -> str:
    """Name of the NetworkPolicy of a job."""
    return dns_label(job)


def initializer_policy_name(job: str) -> str:
    """Name of the NetworkPolicy of its initializers; the dot keeps it from being that of another job."""
    return f"{policy_name(job)}.initializers"


def service_name(job: str) -> str:
    """Name of the rendezvous Service."""
    return f"{dns_label(job, 63 - len('-rdzv'))}-rdzv"


def pvc_name(job: str) -> str:
    """Name of the PersistentVolumeClaim that the operator creates for a job."""
    return f"{dns_label(job, 63 - len('-shared'))}-shared"


def job_labels(job: str, uid: str) -> dict[str, str]:
    """Labels of every child of a job."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: dns_label(job), LABEL_UID: uid}


def pod_labels(attempt: int, node_rank: int | None, nodes: int | None = None) -> dict[str, str]:
    """Labels of one node of the gang besides its job's. With `nodes`, of one that reads its place from them."""
    labels = {LABEL_ATTEMPT: str(attempt), LABEL_NODE_RANK: SPARE if node_rank is None else str(node_rank)}
    return labels | ({} if nodes is None else {LABEL_NODES: str(nodes)})
