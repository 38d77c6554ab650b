"""What roles grant, once the API server knows: its authorizer watches them, as any other client does."""

from __future__ import annotations

from tests.api_server.harness import Cluster
from tests.support.waiting import eventually_async

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


async def in_force(cluster: Cluster, account: str, verb: str, resource: str, *, granted: bool = True) -> None:
    """Wait until an account of the namespace has this right, or has it no more. A resource is such as `pods` or
    `ddpjobs.training.ddpjob.io`.
    """
    name, _, group = resource.partition(".")
    attributes = {"namespace": cluster.namespace, "verb": verb, "resource": name, "group": group}
    spec = {"user": f"system:serviceaccount:{cluster.namespace}:{account}", "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}

    async def as_granted() -> bool:
        answer = await cluster.client.create(REVIEWS, "subjectaccessreviews", body)
        return bool(answer["status"].get("allowed")) is granted

    await eventually_async(as_granted, f"{account} may {'' if granted else 'not '}{verb} {resource}")
