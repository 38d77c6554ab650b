"""What is wrong with a gang that has not failed, as the conditions Degraded and Scheduled report it: an edit that it
cannot follow, fewer nodes than wanted, and why it does not start: with the scheduler's, kubelet's or API server's
message, or, where a pod's status has none, with the warning among its events.

Many a pod is Unschedulable for a moment while its claim binds, so a problem has to last before it is worth a write; and
messages that differ in their numbers alone ("0/7 nodes are available") are the same problem, written once.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from math import inf

from ddpjob_operator.api.status import Condition, DDPJobStatus, Phase
from ddpjob_operator.core.failure.diagnosis import advice_for
from ddpjob_operator.core.failure.node_exclusion import kept_away_from
from ddpjob_operator.core.gang.members import asking_since, members, starting_since, still_holds
from ddpjob_operator.core.manifests.spec_changes import edited_fields
from ddpjob_operator.core.transitions import degrade, mark_scheduled, mark_unscheduled, recover
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Event, ReadWarnings
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import pvc_name
from ddpjob_operator.core.values.observed import PodPhase, PodView

STARTUP_GRACE_SECONDS = 3.0


AUTOSCALER_SECONDS = 15.0
"""How long an autoscaler may take to see that a pod finds no node. Karpenter gathers pods for up to 10 s."""

SHORTEST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 60.0
"""Between two looks into a pod's events."""

NO_SCHEDULER_SECONDS = 30.0
"""How long a pod may wait before a scheduler has said anything about it."""


NOT_SCHEDULED = "NotScheduled"


GATED = "SchedulingGated"
"""A pod that a queue holds back (KEP-3521). It waits, and nothing is wrong."""


_SAME = dict.fromkeys(("ImagePullBackOff", "RegistryUnavailable", "SignatureValidationFailed"), "ErrImagePull")
"""The kubelet reports one problem under two names by turns; following it would be a write each time. With CRI-O, the
first one may be of a registry that does not answer, or of a signature that does not fit.
"""


_WAITING = (Phase.PENDING, Phase.STARTING, Phase.RESTARTING)
_NUMBER = re.compile(r"\d+")


_NO_VOLUME = (
    "A claim has no volume: its events say why (kubectl describe pvc). To change its StorageClass, access mode or "
    "size, delete it along with the job: a claim that is there is used again as it is."
)


HINTS: tuple[tuple[str, str, str], ...] = (
    (
        "Unschedulable",
        r"persistentvolumeclaim \S+ not found",
        "If spec.shared.claimName names it, create it or correct the name. A claim of the operator's is created again.",
    ),
    (
        "Unschedulable",
        r"unbound immediate PersistentVolumeClaims",
        "The claim is not bound: check that its StorageClass exists and supports the access mode and size. To change "
        "them, delete the claim along with the job: a claim that is there is used again as it is.",
    ),
    # a claim that waits for its volume at the node of another pod; that the others are full says nothing then
    ("Unschedulable", r"didn't find available persistent volumes", _NO_VOLUME),
    ("SchedulerError", r"bind(ing)? volumes", _NO_VOLUME),
    (
        "Unschedulable",
        r"Insufficient \S+|Too many pods",
        "The nodes are full or too small: add nodes, lower resources.requests, or make the job elastic.",
    ),
    (
        "Unschedulable",
        r"untolerated taint",
        "Add a toleration to podTemplate.spec.tolerations, or use other nodes.",
    ),
    (
        "CreateContainerConfigError",
        r"(secret|configmap) \S+ not found",
        "Create it in the job's namespace, or correct the name in env or podTemplate. The pod then starts.",
    ),
    (
        "CreateContainerConfigError",
        r"couldn't find key",
        "Add the key, or correct it in env or podTemplate. The pod then starts.",
    ),
    (
        "CreateContainerConfigError",
        r"runAsNonRoot|non-root policy",
        "Use an image with a non-root user, or set runAsNonRoot: false in the securityContext of podTemplate.",
    ),
    (
        "FailedMount",
        r"(secret|configmap) \S+ not found",
        "Create it in the job's namespace, or correct the name in podTemplate. The pod then starts.",
    ),
    (
        "FailedMount",
        r"",
        "Check whether the storage server responds, and whether the node can mount this type of volume.",
    ),
    (
        "FailedAttachVolume",
        r"multi-attach",
        "One node at a time can use this volume, and another one has it. If that is lost for good, delete its Node "
        "object; if it is shut down, taint it node.kubernetes.io/out-of-service=nodeshutdown:NoExecute until it is "
        "back.",
    ),
    ("FailedAttachVolume", r"", "Check whether another node still has the volume attached, and the CSI driver."),
    ("FailedCreatePodSandBox", r"", "Check the node's network plugin (CNI) and container runtime."),
    ("InvalidImageName", r"", "Correct the image name."),
    (
        "ErrImageNeverPull",
        r"",
        "The image is not present on the node: load it, or set another imagePullPolicy in podTemplate.",
    ),
    (
        "QuotaExceeded",
        r"",
        "Raise the namespace's ResourceQuota, free resources, or lower resources.requests. The operator retries.",
    ),
    (
        "AdmissionDenied",
        r"service account volume mount",
        "Set automountServiceAccountToken: true in podTemplate.spec; pods of a job have no token unless it says so.",
    ),
    (
        "AdmissionDenied",
        r"",
        "Change the spec so that the admission policy accepts it, or ask the policy's administrator.",
    ),
    (
        "AdmissionFailed",
        r"",
        "The admission webhook does not respond, or fails: ask its administrator. The operator retries.",
    ),
    (
        "TooLarge",
        r"",
        "Shorten args, env or podTemplate; long content belongs on the volume, in a ConfigMap or in spec.code.",
    ),
    (
        "Forbidden",
        r'violates PodSecurity.*"(istio|linkerd)-init"',
        "The init container of a service mesh does: keep the pods out of the mesh, or use the mesh's CNI plugin.",
    ),
    (
        "Forbidden",
        r"violates PodSecurity",
        "Change podTemplate's securityContext, or the Pod Security level of the namespace.",
    ),
    (
        "Forbidden",
        r"(maximum|minimum) \S+ usage per|limit to request ratio",
        "A LimitRange of the namespace says so: keep resources, or shared.size, within it, or have it changed.",
    ),
    (
        "Invalid",
        r"must be less than or equal to \S+ limit",
        "Set resources.limits: where there is none, a LimitRange of the namespace may have set this one.",
    ),
    ("Forbidden", r"no PriorityClass with name", "Create the PriorityClass, or correct scheduling.priorityClassName."),
    (
        "Forbidden",
        r"serviceaccount \S+ not found",
        "Create the ServiceAccount, or correct podTemplate.spec.serviceAccountName.",
    ),
    (
        NOT_SCHEDULED,
        r"",
        "As long as the claim is not bound, the scheduler may wait for its volume, ten minutes without a word: the "
        "claim's events say why (kubectl describe pvc). Otherwise, check that the scheduler of the pod (schedulerName) "
        "is installed and running.",
    ),
)
"""What to do about a reason, where the words that come with it match."""


def with_problems(look: Look) -> Look:
    """The look with what is wrong, if anything is."""
    job = look.job
    if edited := edited_fields(job, look.status):
        names = ", ".join(f"spec.{name}" for name in edited)
        message = (
            f"{names} changed while the job runs; attempt {look.status.attempt} keeps the old spec, and a later "
            "attempt would use the new one. Revert the edit, or delete the job and apply it again"
        )
        return degrade(look, Problem("SpecChanged", message))
    if job.rejected_edit:
        return degrade(look, job.rejected_edit)
    pods, running = members(look), look.status.phase is Phase.RUNNING
    problem = startup_problem(look, pods)
    if not running:
        look = with_scheduled(look, pods, problem)
    if problem is not None and is_degraded(problem):
        return degrade(look, problem)
    total = look.status.nodes.total
    if running and job.spec.elastic is not None and total < job.spec.nodes:
        message = f"training with {total} of {job.spec.nodes} nodes until more are available"
        return degrade(look, Problem("FewerNodes", message))
    return recover(look)


def degraded_events(before: DDPJobStatus, after: DDPJobStatus) -> tuple[Event, ...]:
    """The event for what has come in the job's way: one for each reason, however long it lasts."""
    known, found = _known(before), _known(after)
    if found is None or (known is not None and known.reason == found.reason):
        return ()
    first, _, _ = found.message.partition("\n")
    return (Event("Warning", cond.DEGRADED, f"{found.reason}: {first}"),)


def startup_problem(look: Look, pods: tuple[PodView, ...]) -> Problem | None:
    """What keeps `pods` from running, or None.

    At once where the API server refused one, after a grace for pods that wait.
    """
    if look.observed.problem is not None:
        return _advised(look.observed.problem.reason, look.observed.problem.message)
    known, waited = _known(look.status), _seconds_waited(look)
    if known is None and waited < STARTUP_GRACE_SECONDS:
        return None
    telling: Problem | None = None
    for pod in pods:
        found = _of_pod(look, pod, waited) if pod.phase is PodPhase.PENDING else None
        if found is not None and found.reason != NOT_SCHEDULED:
            telling = found
            break
        # a scheduler that holds pods back until all of a gang fit says nothing of them, but of the one that does not
        telling = telling or found
    if telling is None or known is None or not _is_known(telling, known):
        return telling
    return Problem(known.reason, known.message)


def until_startup_problem(look: Look) -> float | None:
    """Seconds until a pod that waits without an end may count as a problem; None once it does."""
    ages = (_age(look, pod) for pod in members(look) if not pod.placed)
    waited = min((_seconds_waited(look), *ages))
    return next((limit - waited for limit in (STARTUP_GRACE_SECONDS, NO_SCHEDULER_SECONDS) if waited < limit), None)


def is_degraded(problem: Problem) -> bool:
    """Whether something is wrong: to wait in a queue is not."""
    return problem.reason != GATED


def with_scheduled(look: Look, pods: tuple[PodView, ...], problem: Problem | None) -> Look:
    """The look with the condition Scheduled as it follows from `pods`, those of the gang.

    It becomes True with the condition Running, at no cost. Before that it is written only along with a problem, or
    where that is over.
    """
    if problem is None and _known(look.status) is None and not _is_gated(look.status):
        return look
    if len(pods) >= look.gang_size and all(pod.scheduled or pod.node_name for pod in pods):
        return mark_scheduled(look)
    return mark_unscheduled(look, problem)


def _of_pod(look: Look, pod: PodView, waited: float) -> Problem | None:
    if pod.reason:
        words = pod.message or pod.reason
        if pod.reason == "Unschedulable" and (away := kept_away_from(look.status)):
            words = f"{words.rstrip('. ')}; {away}"
        return _advised(_SAME.get(pod.reason, pod.reason), f"pod {pod.name}: {words}")
    warned = look.observed.warnings.get(pod.uid)
    if warned is not None and warned.reason:
        return _advised(warned.reason, f"pod {pod.name}: {warned.message or warned.reason}")
    if min(waited, _age(look, pod)) >= NO_SCHEDULER_SECONDS and not (pod.scheduled or pod.node_name):
        # nor does one that has chosen a node and waits for a volume there (volumeBindingMode WaitForFirstConsumer)
        claim = look.job.spec.shared.claim_name or pvc_name(look.job.name)
        return _advised(NOT_SCHEDULED, f"pod {pod.name}: no scheduler has said anything about it; its claim is {claim}")
    return None


def _age(look: Look, pod: PodView) -> float:
    return look.seconds_since(pod.created) if pod.created is not None else inf


def _advised(reason: str, said: str) -> Problem:
    hints = (hint for of, pattern, hint in HINTS if of == reason and re.search(pattern, said, re.IGNORECASE))
    hint = next(hints, advice_for(reason))
    return Problem(reason, f"{said.rstrip('. ')}. {hint}" if hint else said)


def _is_known(found: Problem, known: Condition) -> bool:
    """Whether the status says as much already: the same of the same pod, but for numbers or the kubelet's two names."""
    if found.reason != known.reason:
        return False
    (pod, _, words), (known_pod, _, known_words) = found.message.partition(": "), known.message.partition(": ")
    two_names = found.reason in _SAME.values()
    return pod == known_pod and (two_names or _NUMBER.sub("#", words) == _NUMBER.sub("#", known_words))


def _known(status: DDPJobStatus) -> Condition | None:
    degraded = cond.find(status.conditions, cond.DEGRADED)
    return degraded if degraded is not None and degraded.status == "True" else None


def _is_gated(status: DDPJobStatus) -> bool:
    scheduled = cond.find(status.conditions, cond.SCHEDULED)
    return scheduled is not None and scheduled.reason == GATED


def _seconds_waited(look: Look) -> float:
    since = starting_since(look)
    return 0.0 if since is None else look.seconds_since(since)


# A volume that cannot be mounted (a Secret that is missing, a server that does not answer) and a network that cannot be
# set up leave a pod ContainerCreating without a reason; only the kubelet's events have one. And an autoscaler says in
# events alone why it adds no node. They are read for one pod of the gang, after the time in which a pod usually starts,
# and again after ever longer waits.


def warnings_to_read(look: Look, pods: tuple[PodView, ...]) -> tuple[ReadWarnings, ...]:
    """Read the events of the first pod that waits for what its status does not say, if it is time to."""
    pod, due = _next_reading(look, pods)
    return (ReadWarnings(pod.name, pod.uid),) if pod is not None and due is not None and due <= look.now else ()


def until_warnings_are_read(look: Look, pods: tuple[PodView, ...]) -> float | None:
    """Seconds until it is time to."""
    _, due = _next_reading(look, pods)
    return None if due is None or due <= look.now else look.seconds_until(due)


def _next_reading(look: Look, pods: tuple[PodView, ...]) -> tuple[PodView | None, datetime | None]:
    refused = maybe_refused(look, pods)
    pod = refused[0] if refused else next(filter(_is_unexplained, pods), None)
    if pod is None or look.status.phase not in _WAITING:
        return None, None
    since, grace = starting_since(look), STARTUP_GRACE_SECONDS
    if refused:
        asked = (moment for moment in (asking_since(look), pod.created) if moment is not None)
        since, grace = max(asked, default=None), AUTOSCALER_SECONDS
    if since is None:
        return None, None
    if (known := look.observed.warnings.get(pod.uid)) is None:
        return pod, since + timedelta(seconds=grace)
    waited = (known.at - since).total_seconds()
    wait = min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, waited))
    return pod, known.at + timedelta(seconds=wait)


def maybe_refused(look: Look, pods: tuple[PodView, ...]) -> tuple[PodView, ...]:
    """Those that find no node, and of which an autoscaler may say that it adds none for pods that exclude nodes by
    name. None while pods of an older attempt are about to give back theirs.
    """
    internal = look.status.internal
    names = (look.status.excluded_nodes or internal.avoided_nodes) and not internal.node_names_refused
    if not names or any(still_holds(look, pod) for pod in look.observed.pods):
        return ()
    return tuple(pod for pod in pods if pod.reason == "Unschedulable" and not (pod.placed or pod.deleting))


def _is_unexplained(pod: PodView) -> bool:
    placed = pod.scheduled or pod.node_name is not None
    return pod.phase is PodPhase.PENDING and placed and not pod.reason and not pod.deleting
