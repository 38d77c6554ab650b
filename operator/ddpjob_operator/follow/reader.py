"""With what the volume of a job is read: its claim, and an image that has the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cluster import paths
from ddpjob_operator.core.manifests.bounds import BEYOND
from ddpjob_operator.core.transitions import INVALID_SPEC, has_had_gang
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.names import ANNOTATION_IMAGE, TRAINER_CONTAINER, pvc_name
from ddpjob_operator.follow.table import printable
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import NAME

REFUSED = (BEYOND, INVALID_SPEC)
"""Reasons for which a job fails before it begins. The rules of a spec come first: one that breaks them may be beyond a
bound as well.
"""


def claim_of(job: Job) -> str:
    """The name of its claim, its own or the operator's."""
    return job.spec.shared.claim_name or pvc_name(job.name)


def refuse_beyond_bounds(job: Job) -> None:
    """A pod that reads the volume has the job's image, account and user. A person who looks at a job that the operator
    has refused for them may have more rights than its author, and would lend them. One that was suspended before it
    began is not refused either: the operator checks a job when it begins.

    Raises:
        ApiError: the job is such a one.
    """
    failure = job.status.last_failure
    if failure is not None and failure.reason in REFUSED:
        why = f"the operator has refused {job.name}, and no pod is started from it"
        raise ApiError(422, failure.reason, f"{why}: {printable(failure.message)}")
    is_unchecked = job.status.phase in (None, Phase.SUSPENDED) and not has_had_gang(job.status)
    if is_unchecked and (job.spec.pod_template is not None or job.spec.shared.claim_name is not None):
        what = "podTemplate and shared.claimName against this cluster's bounds before it has begun"
        raise ApiError(409, "Conflict", f"the operator does not check {job.name}'s {what}; no pod is started from it")


async def read_claim(client: Client, namespace: str, name: str) -> Json:
    """The claim.

    Raises:
        ApiError: there is none, or it may not be read; the message says what to do.
    """
    try:
        if NAME.fullmatch(name) is not None:
            return await client.get(f"{paths.claims(namespace)}/{name}", "persistentvolumeclaims")
    except ApiError as error:
        if not error.not_found:
            raise
    what = f"there is no claim {name} in namespace {namespace}: the volume is gone, or has another name"
    raise ApiError(404, "NotFound", f"{what}; kubectl get pvc lists them, and --claim, in Python claim=, names one")


def image_of(pods: Sequence[Json]) -> str | None:
    """That of the newest trainer pod."""
    newest = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", reverse=True)
    images = (
        container.get("image")
        for pod in newest
        for container in (pod.get("spec") or {}).get("containers") or ()
        if container.get("name") == TRAINER_CONTAINER
    )
    return next((str(image) for image in images if image), None)


def image_with(claim: Json, job: str) -> str:
    """The image of the job that the operator made the claim for.

    Raises:
        ApiError: nothing says it, as of a claim that was there before.
    """
    if found := (claim["metadata"].get("annotations") or {}).get(ANNOTATION_IMAGE):
        return str(found)
    why = f"neither {job} nor the claim {claim['metadata']['name']} says which image has the trainer"
    raise ApiError(0, "NoImage", f"{why}; name it with --image, in Python image=")
