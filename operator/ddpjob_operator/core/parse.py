"""Objects as they come from the wire or from a person's file, parsed once into the values that decisions are
made of.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.rules import problems as rule_problems
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.model import InitializerView, Job, PodPhase, PodView, Termination
from ddpjob_operator.core.names import (
    INITIALIZER,
    LABEL_ATTEMPT,
    LABEL_NODE_RANK,
    LABEL_NODES,
    LABEL_ROLE,
    SPARE,
    TRAINER_CONTAINER,
)

Object = Mapping[str, Any]

_QUANTITY_KINDS = ("constrained-str", "constrained-int")
"""How pydantic tells the two forms of a quantity apart in an error's location."""

_QUANTITY = "such as 2, 500m, 16Gi"
_FORMS = {
    "every": "a number and its unit, such as 100steps, 1epochs or 60seconds",
    "module": "a module's dotted name, such as my_package.train",
    "script": "an absolute path, such as /workspace/train.py",
    "size": _QUANTITY,
    "name": "letters, digits, _, - and ., not beginning with a digit",
    "claimName": "the name of a claim: lower-case letters, digits, - and .",
    "storageClassName": "the name of a class: lower-case letters, digits, - and .",
}
"""What a field with a pattern should look like, for people."""

_QUIET_WAITING = ("ContainerCreating", "PodInitializing", "")


class InvalidJob(ValueError):
    """A DDPJob that cannot be run as written. `problems` has one message each: field, value, fix."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def parse_job(obj: Object, *, strict: bool = False) -> Job:
    """A DDPJob object as a `Job`.

    With `strict` (a person's file) unknown fields are refused too; from an API server they are ignored, since a newer
    CRD may have fields that this operator does not know.

    Raises:
        InvalidJob: if the spec breaks the schema or a rule between fields.
    """
    if strict:
        _refuse_other_kinds(obj)
    try:
        spec = DDPJobSpec.model_validate(obj.get("spec") or {}, extra="forbid" if strict else "ignore")
    except ValidationError as error:
        raise InvalidJob(tuple(dict.fromkeys(_explain(item) for item in error.errors()))) from error
    if broken := rule_problems(spec):
        raise InvalidJob(broken)
    return job_of(obj, spec)


def job_of(obj: Object, spec: DDPJobSpec) -> Job:
    """A DDPJob object as a `Job`, with this spec."""
    metadata = obj.get("metadata") or {}
    return Job(
        name=metadata.get("name", ""),
        namespace=metadata.get("namespace", "default"),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        created=parse_time(metadata.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
        spec=spec,
        status=DDPJobStatus.model_validate(obj.get("status") or {}),
        deleting="deletionTimestamp" in metadata,
    )


def parse_pod(obj: Object) -> PodView | None:
    """A pod of a gang as a `PodView`; None if it does not carry a gang's labels."""
    metadata, spec, status = obj.get("metadata") or {}, obj.get("spec") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    try:
        attempt, told = int(labels[LABEL_ATTEMPT]), labels[LABEL_NODE_RANK]
        node_rank = None if told == SPARE else int(told)
    except (KeyError, ValueError):
        return None
    nodes = labels.get(LABEL_NODES, "")
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    reason, message = _trouble(status, conditions)
    return PodView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        attempt=attempt,
        node_rank=node_rank,
        phase=PodPhase(status.get("phase") or PodPhase.PENDING),
        ready=ready.get("status") == "True",
        ready_since=parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        nodes=int(nodes) if nodes.isdecimal() else None,
        scheduled=conditions.get("PodScheduled", {}).get("status") == "True" or bool(spec.get("nodeName")),
        not_ready_since=_not_ready_since(status, conditions),
        disruption=_disruption(conditions),
        deleting="deletionTimestamp" in metadata,
        gone_by=parse_time(metadata.get("deletionTimestamp")),
        node_name=spec.get("nodeName"),
        pod_ip=status.get("podIP"),
        reason=reason,
        message=message,
        termination=_termination(status),
        exited=_all_exited(status),
    )


def parse_initializer(obj: Object) -> InitializerView | None:
    """The pod that runs a job's initializers; None if it is another."""
    metadata, status = obj.get("metadata") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    number = labels.get(LABEL_ATTEMPT, "")
    if labels.get(LABEL_ROLE) != INITIALIZER or not number.isdecimal():
        return None
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    reason, message = _trouble(status, conditions)
    # one container each, run one after the other: the first that failed ended the pod
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    ended = [(str(item.get("name", "")), found) for item in containers if (found := _ended(item)) is not None]
    telling = next((pair for pair in ended if pair[1].exit_code), ended[-1] if ended else None)
    return InitializerView(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        phase=PodPhase(status.get("phase") or PodPhase.PENDING),
        number=int(number),
        step=telling[0] if telling else "",
        scheduled=conditions.get("PodScheduled", {}).get("status") == "True",
        node_name=(obj.get("spec") or {}).get("nodeName"),
        not_ready_since=_not_ready_since(status, conditions),
        deleting="deletionTimestamp" in metadata,
        gone_by=parse_time(metadata.get("deletionTimestamp")),
        reason=reason,
        message=message,
        termination=telling[1] if telling else None,
        exited=_all_exited(status),
    )


def parse_time(text: str | None) -> datetime | None:
    """An RFC 3339 time of the Kubernetes API."""
    return datetime.fromisoformat(text) if text else None


def _trouble(status: Object, conditions: Mapping[str, Object]) -> tuple[str, str]:
    """Why a pod does not run, in the words of the kubelet or the scheduler."""
    if status.get("reason"):
        return str(status["reason"]), str(status.get("message", ""))
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


def _disruption(conditions: Mapping[str, Object]) -> str:
    """Why the control plane ends the pod (condition DisruptionTarget, KEP-3329), or Kueue (TerminationTarget)."""
    targets = (conditions.get(name, {}) for name in ("DisruptionTarget", "TerminationTarget"))
    return next((str(target.get("reason", "")) for target in targets if target.get("status") == "True"), "")


def _termination(status: Object) -> Termination | None:
    trainers = (item for item in status.get("containerStatuses") or () if item.get("name") == TRAINER_CONTAINER)
    return next((found for item in trainers if (found := _ended(item)) is not None), None)


def _all_exited(status: Object) -> bool:
    """Whether every main container has exited. None is started again: restartPolicy is Never."""
    containers = status.get("containerStatuses") or ()
    return bool(containers) and all((item.get("state") or {}).get("terminated") for item in containers)


def _ended(container: Object) -> Termination | None:
    ended = (container.get("state") or {}).get("terminated")
    if not ended:
        return None
    return Termination(
        exit_code=ended.get("exitCode", 1),
        signal=ended.get("signal"),
        reason=ended.get("reason", ""),
        message=ended.get("message", ""),
        finished_at=parse_time(ended.get("finishedAt")),
    )


def _refuse_other_kinds(obj: Object) -> None:
    found = (obj.get("apiVersion"), obj.get("kind"))
    if found != (API_VERSION, KIND):
        raise InvalidJob((f"apiVersion {found[0]!r}, kind {found[1]!r}: write {API_VERSION}, {KIND}",))
    if not (obj.get("metadata") or {}).get("name"):
        raise InvalidJob(("metadata.name: is missing; give the job a name",))
    unknown = set(obj) - {"apiVersion", "kind", "metadata", "spec", "status"}
    if unknown:
        raise InvalidJob(tuple(f"{key}: is not a field of a {KIND}; move it under spec" for key in sorted(unknown)))


def _explain(error: Any) -> str:
    """One pydantic error as one sentence: field, value, what is allowed."""
    location = error["loc"]
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    value, context = error["input"], error.get("ctx") or {}
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    if location and location[-1] in _QUANTITY_KINDS:
        return f"{path.rpartition('.')[0]}: {shown} is not a quantity; write one {_QUANTITY}"
    match error["type"]:
        case "extra_forbidden":
            return f"{path}: is not a field of a {KIND}{_nearest(location)}"
        case "string_type" if isinstance(value, bool | int | float):
            return f'{path}: {shown} is not text; write it in quotes: "{shown}"'
        case "string_type":
            return f"{path}: {shown} is not text; write a text"
        case "int_type" | "int_parsing" | "int_from_float":
            return f"{path}: {shown} is not a whole number; write one, without quotes"
        case "bool_type" | "bool_parsing":
            return f"{path}: {shown} is neither true nor false; write one of them, without quotes"
        case "tuple_type":
            return f"{path}: {shown} is not a list; write one item a line, each after a dash"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"{path}: {shown} is not an object; write its fields below it, indented"
        case "literal_error":
            return f"{path}: {shown} is not allowed; use {context['expected']}"
        case "string_too_short" | "string_too_long" | "too_long" | "too_short":
            bounds = {"min_length": "at least", "max_length": "at most"}
            allowed = ", ".join(f"{bounds[key]} {context[key]}" for key in bounds if key in context)
            return f"{path}: {shown} has not the right length; {allowed} is allowed"
        case "greater_than_equal":
            return f"{path}: {shown} is too small; use {context['ge']} or more"
        case "less_than_equal":
            return f"{path}: {shown} is too large; use {context['le']} or less"
        case "string_pattern_mismatch":
            return f"{path}: {shown} has not the right form; write {_FORMS.get(location[-1], context['pattern'])}"
        case "missing":
            return f"{path}: is missing; set it"
        case _:
            return f"{path}: {shown}: {error['msg']}"


def _nearest(location: tuple[Any, ...]) -> str:
    model: type[BaseModel] | None = DDPJobSpec
    for part in location[:-1]:
        if isinstance(part, int) or model is None:
            continue
        field = next((item for item in model.model_fields.values() if item.alias == part), None)
        model = _model_of(field.annotation) if field else None
    known = [item.alias or "" for item in model.model_fields.values()] if model else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}" if known else ""


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
