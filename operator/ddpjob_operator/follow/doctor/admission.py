"""Whether the API server takes a job and its pods: what policies, Pod Security and webhooks say to a dry run."""

from __future__ import annotations

from datetime import UTC, datetime

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.values.job import Defaults, Manifest
from ddpjob_operator.core.values.names import service_name
from ddpjob_operator.core.values.observed import ServiceView
from ddpjob_operator.follow.doctor.facts import Facts, Unread
from ddpjob_operator.follow.doctor.findings import Finding, ok, problem, unknown
from ddpjob_operator.wire.jobs import parse_job

JOBS, PODS = "ddpjobs", "pods"
_NAME = "ddpjob-doctor"
_IMAGE = "ddpjob-trainer"
"""Where the operator's own setting cannot be read."""
_NO_UID = "00000000-0000-4000-8000-000000000000"


def trial_job(namespace: str) -> Manifest:
    """A job that names nothing of its own."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": _NAME, "namespace": namespace}, "spec": {}}


def trial_pod(namespace: str, image: str | None) -> Manifest:
    """Node rank 0 of that job as the operator makes it. Its owner is not there, which an API server does not look at;
    but policies refuse pods without one.
    """
    content = trial_job(namespace)
    born = {"uid": _NO_UID, "creationTimestamp": datetime.now(UTC).replace(microsecond=0).isoformat()}
    job = parse_job(content | {"metadata": content["metadata"] | born})
    admitted = admit(job, Defaults(trainer_image=image or _IMAGE))
    assert isinstance(admitted, Admitted), admitted
    pod = build_pod(admitted, Place(0, 0, ServiceView(host=service_name(job.name), attempt=0)))
    return pod | {"metadata": {key: value for key, value in pod["metadata"].items() if key != "finalizers"}}


def admission(facts: Facts) -> Finding:
    """Whether a dry run of a job, and one of its pod, are taken; a pod is tried where the caller may create one."""
    of_job, of_pod = facts.refusals[JOBS], facts.refusals[PODS]
    for what, refusal in (("a job", of_job), ("the pod of a job", of_pod)):
        if isinstance(refusal, str) and refusal:
            fix = "write the job so that it is allowed, or ask an administrator for an exception"
            return problem("admission", f"{what} is refused: {refusal}", fix)
    if isinstance(of_job, Unread):
        return unknown("admission", of_job)
    if isinstance(of_pod, Unread):
        return ok("admission", f"a job is taken in a dry run; its pod was not tried: {of_pod.why}")
    return ok("admission", "a job and its pod are taken in a dry run")
