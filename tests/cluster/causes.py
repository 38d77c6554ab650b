"""Jobs that cannot start, each for one reason: what to apply, and what their conditions must say.

Used by the test, which asserts the words, and by the benchmark, which takes the time until they are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.cluster.history import History
from tests.cluster.kube import Kubectl, Object
from tests.cluster.scenario import digits_job

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Cause:
    """A job of this name, what its spec asks for in vain, and what is said about it."""

    name: str
    spec: dict[str, Any]
    reason: str
    words: str
    advice: str
    before: tuple[Object, ...] = field(default=())
    """What else has to be there first."""


def _secret_variable(secret: str) -> dict[str, Any]:
    return {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}


CAUSES = (
    Cause(
        "image",
        # refused at once: nobody serves images there
        {"image": "localhost:1/nowhere:1"},
        "ErrImagePull",
        "localhost:1/nowhere:1",
        "check its name, its tag and imagePullSecrets",
    ),
    Cause(
        "secret",
        # one node, because this one trains in the end
        {"nodes": 1, "env": [_secret_variable("nowhere"), {"name": "OMP_NUM_THREADS", "value": "1"}]},
        "CreateContainerConfigError",
        'secret "nowhere" not found',
        "Create it in the job's namespace",
    ),
    Cause(
        "mount",
        {
            "podTemplate": {
                "spec": {
                    "volumes": [{"name": "key", "secret": {"secretName": "nowhere-else"}}],
                    "containers": [{"name": "trainer", "volumeMounts": [{"name": "key", "mountPath": "/etc/key"}]}],
                }
            }
        },
        "FailedMount",
        'secret "nowhere-else" not found',
        "Create it in the job's namespace",
    ),
    Cause(
        "claim",
        {"shared": {"claimName": "nowhere"}},
        "Unschedulable",
        'persistentvolumeclaim "nowhere" not found',
        "spec.shared.claimName",
    ),
    Cause(
        "quota",
        {"resources": {"limits": {GPU: 1}}},
        "QuotaExceeded",
        "exceeded quota: no-gpus",
        "Raise the namespace's ResourceQuota",
        (
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "no-gpus"},
                "spec": {"hard": {f"requests.{GPU}": "0"}},
            },
        ),
    ),
    Cause(
        "node",
        {"resources": {"requests": {"memory": "64Ti"}}},
        "Unschedulable",
        "Insufficient memory",
        "add nodes, lower resources.requests",
    ),
)


def apply(kubectl: Kubectl, cause: Cause, **spec: Any) -> None:
    """Create the job. It trains for a few steps only, should it ever start."""
    given = {"args": ["--task=digits", "--max-steps=5"], "shared": {"retain": False}} | cause.spec | spec
    kubectl.apply(digits_job(cause.name, **given))


def condition(job: Object | None, type_: str) -> dict[str, Any] | None:
    """A condition of a job, if it has it."""
    conditions = ((job or {}).get("status") or {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == type_), None)


def wait_degraded(history: History, cause: Cause) -> dict[str, Any]:
    """The condition that says why the job does not start, once it is there. Before that, a scheduler may have said for
    some seconds that the claim was not bound yet, which has the same reason.
    """

    def said() -> dict[str, Any] | None:
        found = condition(history.latest("ddpjobs", cause.name), "Degraded")
        if found is None or (found["status"], found["reason"]) != ("True", cause.reason):
            return None
        return found if cause.words in found["message"] else None

    return history.wait(said, f"job {cause.name} is Degraded: {cause.reason}: {cause.words}")


def wait_condition(history: History, cause: Cause, type_: str, status: str) -> None:
    """Wait until a condition of the job has this status."""

    def has() -> bool:
        found = condition(history.latest("ddpjobs", cause.name), type_)
        return found is not None and found["status"] == status

    history.wait(has, f"{type_} of job {cause.name} is {status}")


def prepare(kubectl: Kubectl) -> None:
    """What the causes need, in force."""
    for obj in (obj for cause in CAUSES for obj in cause.before):
        kubectl.apply(obj)


def quota_is_in_force(kubectl: Kubectl) -> bool:
    """The quota controller has counted what there is; before that the API server refuses for another reason."""
    found = kubectl.get("resourcequota", "no-gpus")
    return bool(found and "hard" in (found.get("status") or {}))
