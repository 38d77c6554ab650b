"""DDPJobs as the API server sends them or as a file has them, parsed into `Job`, with a message for each mistake."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.spec import CONTROLLER_NAME, LONGEST_OWNER, OWNER_ANNOTATION, DDPJobSpec, gpus_in
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.api.validation import is_pattern
from ddpjob_operator.api.validation import problems as rule_problems
from ddpjob_operator.core.transitions import is_under_way
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.wire.objects import Object, is_bounded, parse_time

_QUANTITY_KINDS = ("constrained-str", "constrained-int")
"""How pydantic tells the two forms of a quantity apart in an error's location."""


MOST_LEVELS = 32
"""A pod's own fields have about 15. What is recursive here and in libraries takes several hundred."""

MOST_VALUES = 10_000
"""A value of two bytes in JSON takes up to 64 in memory, and every pass reads them all."""


_EXCESS = [None] * (MOST_VALUES + 1)
"""Stands for a value that is refused: as large as one, and there once."""


_QUANTITY = "such as 2, 500m, 16Gi"


_FORMS = {
    "every": "a number and its unit, such as 100steps, 1epochs or 60seconds",
    "module": "a module's dotted name, such as my_package.train",
    "entrypoint.script": "a path, such as /workspace/train.py",
    "sha256": "64 digits of 0-9 and a-f",
    "requirements": "a path in the folder of the code, such as requirements.txt",
    "size": _QUANTITY,
    "env.name": "letters, digits, _, - and ., not beginning with a digit",
    "initializers.name": "up to 40 lower-case letters, digits and -, not beginning or ending with -",
    "initializers.script": "a shell script as one text, of several lines after `script: |`",
    "claimName": "the name of a claim: lower-case letters, digits, - and .",
    "storageClassName": "the name of a class: lower-case letters, digits, - and .",
}
"""What a field with a pattern should look like, for people: by its name, or that of its parent and its own."""


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
    _refuse_excess(obj.get("spec"))
    try:
        spec = DDPJobSpec.model_validate(obj.get("spec") or {}, extra="forbid" if strict else "ignore")
    except ValidationError as error:
        raise InvalidJob(tuple(dict.fromkeys(_explain(item) for item in error.errors()))) from error
    if broken := rule_problems(spec, has_begun=bool((obj.get("status") or {}).get("phase"))):
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
        status=parse_status(obj.get("status") or {}),
        deleting="deletionTimestamp" in metadata,
        owner=_owner(metadata),
    )


def parse_status(given: Object) -> DDPJobStatus:
    """A status, without the fields and items that this version cannot read: another version, or a person, may have
    written them, and a job must not be left without an operator for that.
    """
    try:
        return DDPJobStatus.model_validate(given)
    except ValidationError as error:
        return DDPJobStatus.model_validate(_readable(given, [found["loc"] for found in error.errors()]))


def ranks_per_node(obj: Object) -> int:
    """Ranks in each pod of a DDPJob, also of one whose spec this version cannot read; cheap, as for a list of jobs."""
    spec = obj.get("spec") or {}
    procs = spec.get("procsPerNode")
    if isinstance(procs, int) and procs > 0:
        return procs
    resources = spec.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    return max(1, gpus_in(limits)) if isinstance(limits, Mapping) else 1


def _readable(given: Object, unreadable: list[tuple[Any, ...]]) -> dict[str, Any]:
    """`given` without what is at these locations: items of a list and fields of `internal`, which are records of
    different things, one by one; any other field as a whole.
    """
    spoilt: dict[str, set[Any]] = {}
    for field, *inner in unreadable:
        spoilt.setdefault(field, set()).add(inner[0] if inner else None)
    kept = {field: value for field, value in given.items() if field not in spoilt}
    for field, indices in spoilt.items():
        if isinstance(given[field], list) and None not in indices:
            kept[field] = [item for index, item in enumerate(given[field]) if index not in indices]
        elif field == "internal" and None not in indices:
            kept[field] = {name: value for name, value in given[field].items() if name not in indices}
    return kept


def _refuse_other_kinds(obj: Object) -> None:
    found = (obj.get("apiVersion"), obj.get("kind"))
    if found != (API_VERSION, KIND):
        raise InvalidJob((f"apiVersion {found[0]!r}, kind {found[1]!r}: write {API_VERSION}, {KIND}",))
    if not (obj.get("metadata") or {}).get("name"):
        raise InvalidJob(("metadata.name: is missing; give the job a name",))
    unknown = set(obj) - {"apiVersion", "kind", "metadata", "spec", "status"}
    if unknown:
        raise InvalidJob(tuple(f"{key}: is not a field of a {KIND}; move it under spec" for key in sorted(unknown)))


def _owner(metadata: Object) -> str:
    """The owner that the job's author names, bounded like every label value."""
    annotations = metadata.get("annotations")
    found = annotations.get(OWNER_ANNOTATION) if isinstance(annotations, Mapping) else None
    return found.strip()[:LONGEST_OWNER] if isinstance(found, str) else ""


_KEPT_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"
)  # fmt: skip


def kept(obj: Object) -> Object:
    """What is remembered of a DDPJob: all that is read later, and nothing that its author can make large for nothing.

    A field of the spec that `parse_job` refuses for its size is refused of this, too.
    """
    spec = obj.get("spec")
    if is_left_to_another(obj):
        spec = {"managedBy": (spec or {})["managedBy"]}
    elif isinstance(spec, dict):
        spec = {field: value if _is_bounded(value) else _EXCESS for field, value in spec.items()}
    metadata = {name: value for name, value in (obj.get("metadata") or {}).items() if name in _KEPT_METADATA}
    if owner := _owner(obj.get("metadata") or {}):
        metadata["annotations"] = {OWNER_ANNOTATION: owner}
    return {**obj, "metadata": metadata} | ({} if spec is None else {"spec": spec})


def _is_bounded(value: Any) -> bool:
    return is_bounded(value, MOST_LEVELS, MOST_VALUES)


def _refuse_excess(spec: Any) -> None:
    """A field without a schema, as CRDs before this one had some, holds whatever its author likes."""
    for field, value in spec.items() if isinstance(spec, dict) else ():
        if not _is_bounded(value):
            excess = f"has more than {MOST_LEVELS} levels or more than {MOST_VALUES} values"
            raise InvalidJob((f"spec.{field}: {excess}; remove what a pod does not need",))


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
        case "string_type" if form := _form(location):
            return f"{path}: {shown} has not the right form; write {form}"
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
            return f"{path}: {shown} has not the right form; write {_form(location) or context['pattern']}"
        case "missing" if location[0] == "code":
            return f"{path}: is missing; `ddpjob submit` and `ddpjob run` set it"
        case "missing":
            return f"{path}: is missing; set it"
        case _:
            return f"{path}: {shown}: {error['msg']}"


def _form(location: tuple[Any, ...]) -> str | None:
    names = [part for part in location if isinstance(part, str)]
    return _FORMS.get(".".join(names[-2:])) or _FORMS.get(names[-1])


_ELSEWHERE = {
    "replicas": "nodes",
    "workers": "nodes",
    "numNodes": "nodes",
    "worldSize": "nodes and procsPerNode",
    "nprocPerNode": "procsPerNode",
    "gpus": 'resources.limits["nvidia.com/gpu"]',
    "command": "entrypoint.script or entrypoint.module, and args",
    "script": "entrypoint.script",
    "module": "entrypoint.module",
    "maxRestarts": "restart.maxRestarts",
    "backoffLimit": "restart.maxRestarts",
    "restartPolicy": "restart",
    "minNodes": "elastic.minNodes",
    "template": "podTemplate",
    "nodeSelector": "podTemplate.spec.nodeSelector",
    "tolerations": "podTemplate.spec.tolerations",
    "volumes": "podTemplate.spec.volumes",
    "volumeMounts": "podTemplate.spec.containers, in the container trainer",
    "serviceAccountName": "podTemplate.spec.serviceAccountName",
    "imagePullSecrets": "podTemplate.spec.imagePullSecrets",
    "limits": "resources.limits",
    "requests": "resources.requests",
    "queue": "scheduling.queue",
    "priorityClassName": "scheduling.priorityClassName",
}
"""Names that other job kinds have for fields of the spec, and fields that are deeper in it."""


def _nearest(location: tuple[Any, ...]) -> str:
    if len(location) == 1 and location[0] in _ELSEWHERE:
        return f"; did you mean {_ELSEWHERE[location[0]]}?"
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


def is_left_to_another(obj: Object) -> bool:
    """Whether `managedBy` names another controller.

    Asked of the object as it stands: one that this operator could not even read is none of its business either.
    """
    spec = obj.get("spec")
    return isinstance(spec, Mapping) and spec.get("managedBy") not in (None, CONTROLLER_NAME)


def has_patterns(obj: Object) -> bool:
    """Whether a DDPJob has patterns of its author's, which take long to compile and to match. Any object will do."""
    return any(_pattern(rule) is not None for rule in _rules(obj))


def without_broken_rules(obj: Object) -> Job | None:
    """A DDPJob without the restart rules whose pattern cannot be read, if it has begun and is sound otherwise.

    They may come with an edit, or with an operator that reads fewer patterns than the one before. The job must not be
    left without an operator for them.
    """
    if not is_under_way(parse_status(obj.get("status") or {})):
        return None
    rules = _rules(obj)
    sound = [rule for rule in rules if not isinstance(text := _pattern(rule), str) or is_pattern(text)]
    if len(sound) == len(rules):
        return None
    restart = {**obj["spec"]["restart"], "rules": sound}
    try:
        return parse_job({**obj, "spec": {**obj["spec"], "restart": restart}})
    except InvalidJob:
        return None


def _rules(obj: Object) -> list[Any]:
    found: Any = obj
    for name in ("spec", "restart", "rules"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, list) else []


def _pattern(rule: Any) -> Any:
    return rule.get("messagePattern") if isinstance(rule, Mapping) else None
