"""What a drained node has to do with jobs: which of its pods are theirs, and what follows for each job, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api import GROUP, KIND
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.failure.detect import EXIT_PREEMPTED, Failure, Retry
from ddpjob_operator.core.failure.restart_rules import RuleAction, rule_on
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.wire.objects import Object
from ddpjob_operator.wire.pods import parse_initializer, parse_pod

DRAINED = "Drained"
"""The reason of the failure that an eviction is for a job."""
_MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a static pod: its kubelet has it from a file."""
_BEFORE_1_22 = "policy/v1beta1"
_SINCE_1_22 = "policy/v1"


@dataclass(frozen=True, slots=True)
class Owner:
    """The DDPJob that controls a pod."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Held:
    """A pod of a DDPJob that keeps the node from being drained."""

    owner: Owner
    view: PodView
    initializer: bool = False
    finalizers: tuple[str, ...] = ()
    """Those of others, such as Kueue, which keeps a pod of a group until another one replaces it."""

    def __str__(self) -> str:
        return f"{self.owner.namespace}/{self.view.name}"


@dataclass(frozen=True, slots=True)
class OnNode:
    """The pods of a node."""

    held: tuple[Held, ...] = ()
    """Pods of DDPJobs that run, or are being deleted."""
    ended: int = 0
    """Pods of DDPJobs that have ended. They hold nothing but their logs."""
    others: int = 0
    static: int = 0
    """How many of the others are of DaemonSets, or static: no drain evicts those."""

    def by_owner(self) -> dict[Owner, list[Held]]:
        """The pods of each job, both in order of their names."""
        found: dict[Owner, list[Held]] = {}
        for pod in sorted(self.held, key=lambda pod: (pod.owner.namespace, pod.owner.name, pod.view.name)):
            found.setdefault(pod.owner, []).append(pod)
        return found


def on_node(pods: Iterable[Object]) -> OnNode:
    """Whose the pods of a node are. A job has those that it controls: labels, which anybody may write, do not count."""
    held, ended, others, static = list[Held](), 0, 0, 0
    for pod in pods:
        owner = _owner(pod)
        if owner is None:
            others += 1
            static += _is_static(pod)
            continue
        view = parse_pod(pod)
        if view.ended and not view.deleting:
            ended += 1
        else:
            finalizers = (name for name in pod["metadata"].get("finalizers") or () if name != FINALIZER)
            held.append(Held(owner, view, parse_initializer(pod) is not None, tuple(finalizers)))
    return OnNode(tuple(held), ended, others, static)


def eviction_version(resources: Iterable[Object]) -> str:
    """The apiVersion of an Eviction, by the resources of the core API: `v1beta1` before Kubernetes 1.22."""
    found = next((item for item in resources if item.get("name") == "pods/eviction"), None)
    return _BEFORE_1_22 if found is not None and found.get("version") == "v1beta1" else _SINCE_1_22


def what_follows(job: Job | None, pods: Sequence[Held]) -> str:
    """What becomes of a job, of which these pods are on the node; None is one that is not there any more."""
    views = [pod.view for pod in pods]
    if job is None or job.deleting:
        return f"the job is deleted, and {_names(views)} {_s(views, 'ends', 'end')} with it"
    if all(view.deleting for view in views):
        return f"{_names(views)} {_s(views, 'ends', 'end')} already"
    phase = job.status.phase
    if job.status.is_final:
        return f"the job has {str(phase).lower()}; {_names(views)} {_s(views, 'goes', 'go')}"
    if job.spec.suspend or phase is Phase.SUSPENDED:
        return f"the job is suspended; {_names(views)} {_s(views, 'ends', 'end')}"
    if any(pod.initializer for pod in pods):
        return "its initializers begin again in a new pod"
    current = [view for view in views if view.attempt == job.status.attempt]
    members = [view for view in current if view.node_rank is not None]
    spares = [view for view in current if view.node_rank is None]
    clauses = [_of_members(job, members)] if members else []
    if spares:
        clauses.append(f"{_s(spares, 'spare', 'spares')} {_names(spares)} {_s(spares, 'is', 'are')} replaced")
    if not clauses:
        clauses = [f"{_names(views)} {_s(views, 'is', 'are')} of an earlier attempt, and {_s(views, 'ends', 'end')}"]
    return "; ".join(clauses)


def unreadable_in_words(pods: Sequence[Held]) -> str:
    """The same of a job whose spec this version of the command cannot read."""
    views = [pod.view for pod in pods]
    return f"{_names(views)} {_s(views, 'is', 'are')} replaced as its restart.scope says, which cannot be read here"


def others_in_words(found: OnNode, node: str) -> list[str]:
    """What is left alone."""
    lines = []
    if found.ended:
        of_jobs = "pod of a DDPJob that has" if found.ended == 1 else "pods of DDPJobs that have"
        lines.append(f"{found.ended} {of_jobs} ended {'stays' if found.ended == 1 else 'stay'} for the logs")
    if found.others:
        static = f" ({found.static} of DaemonSets or static)" if found.static else ""
        pods = "other pod stays" if found.others == 1 else "other pods stay"
        lines.append(f"{found.others} {pods} on {node}{static}; kubectl drain is for those")
    return lines


def drained_in_words(node: str, *, found_any: bool) -> tuple[str, str]:
    """The last lines of a drain that is done."""
    state = "is left" if found_any else "is"
    return f"no pod of a DDPJob {state} on {node}", uncordon_in_words(node)


def uncordon_in_words(node: str) -> str:
    """How to take the node into service again."""
    return f"kubectl uncordon {node} takes it into service again"


def interrupted_in_words(node: str, evicted: Iterable[str]) -> str:
    """What a drain leaves that was stopped after it had cordoned the node."""
    done = ", ".join(evicted) or "no pod"
    return f"{node} stays cordoned; evicted: {done}; the same command goes on; {uncordon_in_words(node)}"


def still_there_in_words(pod: Held, refusal: str | None, now: datetime) -> str:
    """Why a pod is still on the node."""
    view = pod.view
    if not view.deleting:
        return f"{pod} is not evicted: {refusal or 'it was not asked yet'}"
    if view.ended and view.held:
        return f"{pod} has ended, but no operator has put its end on record; check that the operator runs"
    if view.ended and pod.finalizers:
        them = _s(pod.finalizers, "it", "them")
        finalizers = f"{_s(pod.finalizers, 'finalizer', 'finalizers')} {', '.join(pod.finalizers)}"
        return f"{pod} has ended, and stays for the {finalizers}, which whatever has set {them} removes"
    if view.gone_by is not None and view.gone_by > now:
        return f"{pod} has until {view.gone_by:%H:%M:%S} UTC to end"
    return f"{pod} should have ended; check the kubelet of its node"


def refusal_in_words(message: str, details: Mapping[str, object]) -> str:
    """Why the API server does not evict a pod now, with the budget's own numbers."""
    causes = details.get("causes")
    found = [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []
    said = [str(cause.get("message") or "").rstrip(".") for cause in found]
    more = "; ".join(part for part in said if part and part not in message)
    return f"{message.rstrip('.')}: {more}" if more else message.rstrip(".")


def missing_rights_in_words(rights: Sequence[str], *, cordoned: bool) -> str:
    """Which rights the caller lacks."""
    state = "" if cordoned else "; nothing was changed"
    return f"you have no right to {' and to '.join(rights)}{state}; docs/operating.md has a ClusterRole for drains"


def _of_members(job: Job, members: Sequence[PodView]) -> str:
    """What the loss of these pods of the gang is for the others."""
    scope, status, restart = job.spec.restart.scope, job.status, job.spec.restart
    ranks = _ranks(members)
    there = max(status.nodes.total or job.spec.nodes, len(members))
    left = there - len(members)
    if status.phase is not Phase.RUNNING:
        again = "with new pods" if scope == "Gang" or not left else f"with {_new_pods(members)} for {ranks}"
        return f"attempt {status.attempt} has not begun to train; it begins again {again}"
    failure = Failure(DRAINED, "", Retry.YES, exit_code=EXIT_PREEMPTED, outside=True)
    ruling = rule_on(restart, failure)
    if ruling.action is RuleAction.FAIL:
        return f"{_saved(job)}, and the job fails: {ruling.why}"
    scoped = f"(restart.scope {scope})"
    if not left:
        return f"all of its pods are here: {_saved(job)}, and new pods go on from it {scoped}"
    if scope == "Gang":
        return f"{_saved(job)}, and the whole gang of {there} restarts from it with new pods {scoped}"
    new = f"{_new_pods(members)} or {_s(members, 'a spare', 'spares')}" if job.spec.spares else _new_pods(members)
    if scope == "InPlace":
        return f"{_saved(job)}, and the gang restarts from it in place, with {new} for {ranks} {scoped}"
    least = job.spec.elastic.min_nodes if job.spec.elastic is not None else 1
    if left < least:
        fewer = f"fewer than elastic.minNodes: {least} would be left"
        return f"{fewer}: {_saved(job)}, and the gang restarts from it in place, with {new} {scoped}"
    others = f"the other {left} go on" if left > 1 else "the other one goes on"
    joins = f"{new} {_s(members, 'joins', 'join')} later"
    return f"{ranks} {_s(members, 'leaves', 'leave')} at the end of a step, {others}, and {joins} {scoped}"


def _saved(job: Job) -> str:
    return "all ranks save a snapshot" + ("" if job.spec.is_built_in else ", if the script makes any")


def _new_pods(members: Sequence[PodView]) -> str:
    return "a new pod" if len(members) == 1 else f"{len(members)} new pods"


def _ranks(members: Sequence[PodView]) -> str:
    numbers = sorted(view.node_rank for view in members if view.node_rank is not None)
    return f"{_s(members, 'node rank', 'node ranks')} {', '.join(map(str, numbers))}"


def _names(views: Sequence[PodView]) -> str:
    return ", ".join(view.name for view in views)


def _s(several: Sequence[object], one: str, many: str) -> str:
    return one if len(several) == 1 else many


def _owner(pod: Object) -> Owner | None:
    """The DDPJob that controls the pod; None if something else does, or nothing."""
    metadata = pod["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        of_ours = owner.get("kind") == KIND and str(owner.get("apiVersion")).partition("/")[0] == GROUP
        if of_ours and owner.get("controller"):
            return Owner(metadata["namespace"], owner["name"], owner["uid"])
    return None


def _is_static(pod: Object) -> bool:
    metadata = pod["metadata"]
    owners = metadata.get("ownerReferences") or ()
    return _MIRROR in (metadata.get("annotations") or {}) or any(
        owner.get("kind") == "DaemonSet" and owner.get("controller") for owner in owners
    )
