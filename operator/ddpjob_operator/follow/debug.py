"""Which pod of a job failed, where, and what it was made from: for `ddpjob debug`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH, Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Bounds, Defaults, Job, Manifest, PodSecurity
from ddpjob_operator.core.values.names import LABEL_ATTEMPT, LABEL_NODE_RANK, TRAINER_CONTAINER, service_name
from ddpjob_operator.core.values.observed import PodPhase, ServiceView
from ddpjob_operator.follow.reader import REFUSED

_UNBOUNDED = Bounds(pod_security=PodSecurity.PRIVILEGED, host_network=True)
"""The operator has admitted the job; what this pod may be, the API server decides for the caller."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The pod that failed last."""

    attempt: int
    node_rank: int
    node: str | None
    """Its Kubernetes node, if it came to have one."""
    pod: Manifest | None
    """The object, while it is there."""


def failed_pod(job: Job, pods: Iterable[Manifest]) -> Failed | None:
    """The pod of the last failure on record, or else one that has failed; None if none has. A job that was refused has
    failed without one: the operator has not admitted it, and no pod is made from it here either.
    """
    found = list(pods)
    last = job.status.last_failure
    failure = None if last is not None and last.reason in REFUSED else last
    if failure is not None and (failure.pod_name or failure.node_name):
        pod = next((item for item in found if item["metadata"]["name"] == failure.pod_name), None)
        node = failure.node_name or (pod["spec"].get("nodeName") if pod else None)
        return Failed(failure.attempt, failure.node_rank or 0, node, pod)
    ended = [item for item in found if (item.get("status") or {}).get("phase") == PodPhase.FAILED]
    if ended:
        newest = max(ended, key=lambda item: item["metadata"].get("creationTimestamp") or "")
        labels = newest["metadata"].get("labels") or {}
        attempt, rank = (_number(labels.get(name)) for name in (LABEL_ATTEMPT, LABEL_NODE_RANK))
        return Failed(attempt, rank, newest["spec"].get("nodeName"), newest)
    return None if failure is None else Failed(failure.attempt, failure.node_rank or 0, None, None)


def pod_of(failed: Failed, job: Job, image: str) -> Manifest:
    """The failed pod as it is or, if it is gone, as the operator would make it from the job now; with this image.

    Raises:
        ValueError: the job as it is now has no pods.
    """
    pod = failed.pod
    if pod is None:
        admitted = admit(job, Defaults(trainer_image=image, bounds=_UNBOUNDED))
        if isinstance(admitted, Refused):
            raise ValueError("; ".join(admitted.problems))
        service = ServiceView(host=service_name(job.name), attempt=failed.attempt)
        pod = build_pod(admitted, Place(failed.attempt, failed.node_rank, service))
    containers = [
        item | {"image": image} if item["name"] == TRAINER_CONTAINER else item for item in pod["spec"]["containers"]
    ]
    return pod | {"spec": pod["spec"] | {"containers": containers}}


def shell_command(namespace: str, pod: str, context: str | None, job: Job) -> tuple[str, ...]:
    """Opens a shell in the pod; for submitted code in the folder in which the script ran, with its packages."""
    where = ("--context", context) if context is not None else ()
    code, work = job.spec.code, f"{SHARED_PATH}/work"
    shell: tuple[str, ...] = ("sh",)
    if code is not None:
        packages = f"PATH={work}/.{job.name}/environment/bin:$PATH; " if code.requirements is not None else ""
        shell = ("sh", "-c", f"cd {work}/{job.name}; {packages}exec sh")
    return ("kubectl", *where, "exec", "-it", "-n", namespace, pod, "-c", TRAINER_CONTAINER, "--", *shell)


def in_words(failed: Failed, visit_node: str | None) -> str:
    """Such as `like that of node rank 1, attempt 0, on node worker-3`."""
    where = f"on its node {visit_node}" if visit_node is not None else "on any node"
    source = "" if failed.pod is not None else ", as the job is written now: the pod itself is gone"
    return f"like that of node rank {failed.node_rank}, attempt {failed.attempt}, {where}{source}"


def as_text(command: Iterable[str]) -> str:
    """A command to copy."""
    return shlex.join(command)


def _number(label: str | None) -> int:
    return int(label) if label is not None and label.isdigit() else 0
