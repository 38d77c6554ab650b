"""Pods as the API server sends them, parsed into `PodView` and `InitializerView`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic_core import SchemaValidator
from pydantic_core.core_schema import CoreSchema, any_schema, list_schema, typed_dict_field, typed_dict_schema

from ddpjob_operator.core.values.names import (
    FINALIZER,
    INITIALIZER,
    KUEUE_DOMAIN,
    KUEUE_GROUP,
    LABEL_ATTEMPT,
    LABEL_GROUP,
    LABEL_LAST_INITIALIZER,
    LABEL_NODE_RANK,
    LABEL_NODES,
    LABEL_ROLE,
    LABEL_SYNC,
    SPARE,
    TRAINER_CONTAINER,
)
from ddpjob_operator.core.values.observed import (
    NO_ATTEMPT,
    InitFailure,
    InitializerView,
    PodPhase,
    PodView,
    Termination,
)
from ddpjob_operator.wire.objects import Object, parse_time


def _only(*anything: str, **fields: CoreSchema) -> CoreSchema:
    """An object of which these fields are decoded, where it has them, and no others."""
    known = dict.fromkeys(anything, any_schema()) | fields
    return typed_dict_schema({name: typed_dict_field(schema, required=False) for name, schema in known.items()})


_CONSUMES = (
    "autoscaling.x-k8s.io/consume-provisioning-request",
    "cluster-autoscaler.kubernetes.io/consume-provisioning-request",
)
"""Annotations that Kueue gives the pods of a group whose capacity was provisioned; the second one is the older name."""
_HOSTNAME = "kubernetes.io/hostname"

_METADATA = _only(
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "ownerReferences",
    "finalizers",
    annotations=_only(*_CONSUMES),
)
_POD = _only("status", metadata=_METADATA, spec=_only("nodeName", nodeSelector=_only(_HOSTNAME)))
_LIST = SchemaValidator(_only("metadata", items=list_schema(_POD)))

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_LONGEST_GRACE_SECONDS = 10**9
_QUIET_WAITING = ("ContainerCreating", "PodInitializing", "")
_STATUS_UNKNOWN = "ContainerStatusUnknown"
_NEVER_STARTED = Termination(137, reason=_STATUS_UNKNOWN)
"""Of a container that was made and never started: as of one that its runtime has forgotten."""


def decode_pods(payload: bytes) -> dict[str, Any]:
    """A list of pods with the fields alone that are read of a pod. To make Python objects of all, of which half are
    managed fields, takes three times as long.

    Raises:
        ValueError: it is no list of pods, or one that is nested too deeply.
    """
    found: dict[str, Any] = _LIST.validate_json(payload)
    return found


def parse_pod(obj: Object) -> PodView:
    """A pod of a gang as a `PodView`, of no attempt if its labels do not name one and a node rank."""
    metadata, spec, status = obj.get("metadata") or {}, obj.get("spec") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    attempt, node_rank = _place(labels)
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    reason, message = _problem(status, conditions)
    disruption, disruption_message = _disruption(conditions)
    lost = _may_be_lost(metadata, status)
    return PodView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=attempt,
        node_rank=node_rank,
        phase=PodPhase(status.get("phase") or PodPhase.PENDING),
        ready=ready.get("status") == "True",
        ready_since=parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        nodes=_number(labels.get(LABEL_NODES)),
        group=str(labels.get(LABEL_GROUP) or labels.get(KUEUE_GROUP) or ""),
        reserved=_is_reserved(metadata, spec),
        let_go=_let_go(metadata, conditions),
        sync=str(labels.get(LABEL_SYNC) or ""),
        scheduled=conditions.get("PodScheduled", {}).get("status") == "True" or bool(spec.get("nodeName")),
        not_ready_since=_not_ready_since(status, conditions),
        unacknowledged_since=_unacknowledged_since(obj, conditions),
        created=parse_time(metadata.get("creationTimestamp")),
        disruption=disruption,
        disruption_message=disruption_message,
        deleting="deletionTimestamp" in metadata,
        held=is_held(obj),
        gone_by=_gone_by(obj),
        forced=_is_forced(metadata),
        node_name=spec.get("nodeName"),
        pod_ip=status.get("podIP"),
        reason=reason,
        message=message,
        termination=_termination(status, lost=lost),
        init_failure=_init_failure(status, lost=lost),
        init_running=_init_running(status, conditions),
        began=_began(status),
        exited=_all_exited(status),
    )


def _let_go(metadata: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Kueue's webhook gives each pod the label and the finalizer as it is created. Kueue takes the finalizer away when
    the pod's group is over.
    """
    managed = (metadata.get("labels") or {}).get(f"{KUEUE_DOMAIN}/managed") == "true"
    gated = conditions.get("PodScheduled", {}).get("reason") == "SchedulingGated"
    held = f"{KUEUE_DOMAIN}/managed" in (metadata.get("finalizers") or ())
    return managed and gated and not held and "deletionTimestamp" not in metadata


def _is_reserved(metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Kueue adds both as it admits the pod."""
    annotations = metadata.get("annotations") or {}
    return any(annotations.get(name) for name in _CONSUMES) or _HOSTNAME in (spec.get("nodeSelector") or {})


def is_held(obj: Object) -> bool:
    """Whether a pod has the operator's finalizer."""
    return FINALIZER in ((obj.get("metadata") or {}).get("finalizers") or ())


def _is_forced(metadata: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds") == 0


def parse_initializer(obj: Object) -> InitializerView | None:
    """The pod that runs a job's initializers; None if it is another."""
    metadata, status = obj.get("metadata") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    number = _number(labels.get(LABEL_ATTEMPT))
    if labels.get(LABEL_ROLE) != INITIALIZER or number is None:
        return None
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    reason, message = _problem(status, conditions)
    disruption, disruption_message = _disruption(conditions)
    main, lost = _last_initializer(labels, status), _may_be_lost(metadata, status)
    first, last = _ends(status.get("initContainerStatuses"), lost=lost), _ends(main, lost=lost)
    # one container each, run one after the other: nothing was started after the one that failed, and a sidecar that was
    # injected before it ended with the pod
    ended = last or first
    telling = next((pair for pair in reversed(ended) if pair[1].exit_code), ended[-1] if ended else None)
    return InitializerView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        phase=PodPhase(status.get("phase") or PodPhase.PENDING),
        number=number,
        step=telling[0] if telling else "",
        scheduled=conditions.get("PodScheduled", {}).get("status") == "True",
        node_name=(obj.get("spec") or {}).get("nodeName"),
        not_ready_since=_not_ready_since(status, conditions),
        unacknowledged_since=_unacknowledged_since(obj, conditions),
        disruption=disruption,
        disruption_message=disruption_message,
        deleting="deletionTimestamp" in metadata,
        gone_by=parse_time(metadata.get("deletionTimestamp")),
        forced=_is_forced(metadata),
        reason=reason,
        message=message,
        termination=telling[1] if telling else None,
        done=bool(main) and len(last) == len(main),
        exited=_all_exited(status),
    )


def _last_initializer(labels: Mapping[str, str], status: Object) -> list[Object]:
    """The main container that the operator made, among those that a webhook has injected. A pod that an older operator
    made does not name it.
    """
    containers = list(status.get("containerStatuses") or ())
    return [item for item in containers if item.get("name") == labels.get(LABEL_LAST_INITIALIZER)] or containers


def _ends(containers: Iterable[Object] | None, *, lost: bool) -> list[tuple[str, Termination]]:
    """Name and end of each of `containers` that has ended."""
    ends = ((str(item.get("name", "")), _ended(item, lost=lost)) for item in containers or ())
    return [(name, found) for name, found in ends if found is not None]


def _place(labels: Mapping[str, str]) -> tuple[int, int | None]:
    """Attempt and node rank by the labels, which anybody with the right to patch pods may have changed."""
    attempt, node_rank = _number(labels.get(LABEL_ATTEMPT)), labels.get(LABEL_NODE_RANK)
    rank = None if node_rank == SPARE else _number(node_rank)
    if attempt is None or (rank is None and node_rank != SPARE):
        return NO_ATTEMPT, None
    return attempt, rank


def _number(label: str | None) -> int | None:
    """The number of a label that the operator could have written."""
    return int(label) if label is not None and _NUMBER.fullmatch(label) else None


def _problem(status: Object, conditions: Mapping[str, Object]) -> tuple[str, str]:
    """Why a pod does not run, as the kubelet or the scheduler says."""
    if status.get("reason"):
        return str(status["reason"]), str(status.get("message", ""))
    if PodPhase(status.get("phase") or PodPhase.PENDING).final:
        return "", ""  # what it waited for before is not why it ended
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _QUIET_WAITING:
            return str(waiting["reason"]), str(waiting.get("message", ""))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason", "Unschedulable")), str(scheduled.get("message", ""))
    return "", ""


def _not_ready_since(status: Object, conditions: Mapping[str, Object]) -> datetime | None:
    """When the node lifecycle controller marked a running pod not ready because its node had fallen silent.

    That controller changes the condition Ready alone. A kubelet that sees a container fail its probe changes
    ContainersReady with it, and gives a reason where a readiness gate is what is missing.
    """
    ready = conditions.get("Ready", {})
    silent = ready.get("status") == "False" and not ready.get("reason")
    whole = conditions.get("ContainersReady", {}).get("status") == "True"
    running = status.get("phase") == PodPhase.RUNNING
    return parse_time(ready.get("lastTransitionTime")) if running and silent and whole else None


def _unacknowledged_since(obj: Object, conditions: Mapping[str, Object]) -> datetime | None:
    """When a pod was bound that its kubelet has not seen: that sets `startTime` at once, before images and volumes.

    The node controller says nothing of such a pod, which is not ready anyway.
    """
    status = obj.get("status") or {}
    waits = status.get("phase", PodPhase.PENDING) == PodPhase.PENDING and not status.get("startTime")
    if not (waits and (obj.get("spec") or {}).get("nodeName")):
        return None
    return parse_time(conditions.get("PodScheduled", {}).get("lastTransitionTime"))


def _gone_by(obj: Object) -> datetime | None:
    """When a pod that is being deleted should be gone: its grace is for containers, and one without any needs none."""
    metadata, status = obj.get("metadata") or {}, obj.get("status") or {}
    until = parse_time(metadata.get("deletionTimestamp"))
    if until is None or status.get("phase", PodPhase.PENDING) != PodPhase.PENDING:
        return until
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    if any((item.get("state") or {}).keys() & {"running", "terminated"} for item in containers):
        return until
    return _without_grace(until, metadata)


def deletion_began(obj: Object) -> datetime | None:
    """When somebody asked for the deletion of a pod, by the API server's clock: a shorter grace does not move it."""
    metadata = obj.get("metadata") or {}
    until = parse_time(metadata.get("deletionTimestamp"))
    return until and _without_grace(until, metadata)


def _without_grace(until: datetime, metadata: Object) -> datetime:
    """The client that deletes a pod chooses its grace, up to 2^63 - 1 seconds, which no calendar has."""
    grace = metadata.get("deletionGracePeriodSeconds") or 0
    return until - timedelta(seconds=min(grace, _LONGEST_GRACE_SECONDS))


def _disruption(conditions: Mapping[str, Object]) -> tuple[str, str]:
    """Why the control plane ends the pod (condition DisruptionTarget, KEP-3329), or Kueue (TerminationTarget, and
    TerminatedByKueue of one that waits for a node of a topology which has got a taint).
    """
    names = ("DisruptionTarget", "TerminationTarget", "TerminatedByKueue")
    targets = (conditions.get(name, {}) for name in names)
    found: Object = next((target for target in targets if target.get("status") == "True"), {})
    return str(found.get("reason", "")), str(found.get("message", ""))


def _termination(status: Object, *, lost: bool) -> Termination | None:
    trainers = (item for item in status.get("containerStatuses") or () if item.get("name") == TRAINER_CONTAINER)
    return next((found for item in trainers if (found := _ended(item, lost=lost)) is not None), None)


def _may_be_lost(metadata: Mapping[str, Any], status: Object) -> bool:
    """Whether a container of the pod that waits may have ended, and its runtime have forgotten it, as after a reboot of
    a node with CRI-O.

    The container waits then, and its last state has ended (`convertToAPIContainerStatuses` in pkg/kubelet). So it does
    in a pod that is deleted and whose container went before the kubelet read its end: the deletion explains that one.
    """
    return status.get("phase") == PodPhase.FAILED and "deletionTimestamp" not in metadata


def _init_failure(status: Object, *, lost: bool) -> InitFailure | None:
    """The last one that failed: nothing after it was started, and a sidecar before it ended with the pod. One that was
    never started has not: its pod waits.
    """
    for container in reversed(status.get("initContainerStatuses") or ()):
        ended = _ended(container, lost=lost)
        if ended is not None and ended is not _NEVER_STARTED and ended.exit_code:
            return InitFailure(str(container.get("name", "")), ended.exit_code, ended.reason)
    return None


def _init_running(status: Object, conditions: Mapping[str, Object]) -> str:
    """The last one that runs: what stands before it is done, or is a sidecar that has started."""
    if conditions.get("Initialized", {}).get("status") != "False":
        return ""
    found = (item for item in status.get("initContainerStatuses") or () if (item.get("state") or {}).get("running"))
    return next((str(item.get("name", "")) for item in reversed(list(found))), "")


def _all_exited(status: Object) -> bool:
    """Whether every main container has exited. None is started again: restartPolicy is Never."""
    containers = status.get("containerStatuses") or ()
    return bool(containers) and all((item.get("state") or {}).get("terminated") for item in containers)


def _began(status: Object) -> bool:
    """Whether a main container was made, or an init container that is not done. Of a pod that is deleted once these are
    done the kubelet says that its main containers have ended, too (`hasPodInitialized` in pkg/kubelet/status).
    """
    ends = (_ended(item, lost=False) for item in status.get("initContainerStatuses") or () if _was_made(item))
    made = any(_was_made(item) for item in status.get("containerStatuses") or ())
    return made or any(end is None or end.exit_code != 0 for end in ends)


def _was_made(container: Object) -> bool:
    """Whether the runtime has, or had, a container. Of a pod that is deleted before, the kubelet says none the less
    that one has ended (`TerminatePod` in pkg/kubelet/status), as ContainerStatusUnknown. One that the runtime has lost
    has nothing but its last state.
    """
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    seen = bool(container.get("containerID") or container.get("lastState"))
    return seen or bool(state.get("running") or (ended and ended.get("reason") != _STATUS_UNKNOWN))


def _ended(container: Object, *, lost: bool) -> Termination | None:
    """How a container ended; where it may be lost, what the kubelet says of one that its runtime has forgotten."""
    ended = (container.get("state") or {}).get("terminated")
    if lost and not ended:
        last = (container.get("lastState") or {}).get("terminated") or {}
        ended = last if last.get("reason") == _STATUS_UNKNOWN else None
    if not ended or not _was_made(container):
        return None
    if _was_not_started(ended):
        return _NEVER_STARTED
    return Termination(
        exit_code=ended.get("exitCode", 1),
        signal=ended.get("signal"),
        reason=ended.get("reason", ""),
        message=ended.get("message", ""),
        finished_at=parse_time(ended.get("finishedAt")),
    )


def _was_not_started(ended: Object) -> bool:
    """Whether a container that has ended, as its kubelet says, was made and never started. A kubelet that is restarted
    in between calls it one that ended with 0, until 1.23 (kubernetes/kubernetes#107845): the pod has succeeded then.
    A runtime gives a reason, and times, for each that has.
    """
    known = ("exitCode", "reason", "message", "startedAt", "finishedAt")
    return bool(ended.get("containerID")) and not any(ended.get(name) for name in known)
