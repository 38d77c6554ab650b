"""What an API server would say of a job's podTemplate, labels and resources, checked without one.

`pod_fields.json` has the fields of a pod and their types, from Kubernetes' own schema (docs/validate_tables.py).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from ddpjob_operator.core.manifests.bounds import amount

_TEMPLATE = "spec.podTemplate.spec"
_CHOICES = {
    ("Container", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    ("Toleration", "effect"): ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    ("Toleration", "operator"): ("Exists", "Equal", "Lt", "Gt"),
    ("NodeSelectorRequirement", "operator"): ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    ("PodSpec", "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
}
_MUST_CHOOSE = {("NodeSelectorRequirement", "operator")}
"""Of the others, an empty text is the default."""
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "int-or-string": (int, str),
}
_IN_WORDS = {
    "string": "text",
    "int": "a whole number",
    "number": "a number",
    "bool": "true or false, without quotes",
    "int-or-string": "a whole number or text",
}


def pod_problems(metadata: Any, spec: Mapping[str, Any]) -> Iterator[str]:
    """Each problem as field, value and fix. Neither argument has been validated."""
    for name in ("labels", "annotations"):
        yield from _string_map((metadata or {}).get(name) if isinstance(metadata, dict) else None, f"metadata.{name}")
    template = spec.get("podTemplate")
    if isinstance(template, dict):
        inner = template.get("metadata")
        if isinstance(inner, dict):
            yield from _string_map(inner.get("labels"), "spec.podTemplate.metadata.labels")
        yield from _of_type("PodSpec", template.get("spec"), _TEMPLATE)
        for index, container in enumerate(_containers(template.get("spec"))):
            yield from _resources(container.get("resources"), f"{_TEMPLATE}.containers[{index}].resources")
    yield from _resources(spec.get("resources"), "spec.resources")
    yield from _ranks(spec)


def _containers(template: Any) -> list[Mapping[str, Any]]:
    found = template.get("containers") if isinstance(template, dict) else None
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


@cache
def _fields() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("pod_fields.json").read_text())
    return found


def _of_type(kind: str, value: Any, path: str) -> Iterator[str]:
    if value is None or kind == "any":
        return
    if kind.startswith("["):
        if not isinstance(value, list):
            yield f"{path}: {_shown(value)} is not a list; write one item a line, each after a dash"
            return
        for index, item in enumerate(value):
            yield from _of_type(kind[1:-1], item, f"{path}[{index}]")
    elif kind.startswith("{"):
        if not isinstance(value, dict):
            yield f"{path}: {_shown(value)} is not an object; write its fields below it, indented"
            return
        for key, item in value.items():
            yield from _of_type(kind[1:-1], item, f"{path}[{key}]")
    elif kind == "quantity":
        yield from _quantity(value, path)
    elif kind in _KINDS:
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            fix = f'write it in quotes: "{_shown(value)}"' if kind == "string" else f"write {_IN_WORDS[kind]}"
            yield f"{path}: {_shown(value)} is not {_IN_WORDS[kind].partition(',')[0]}; {fix}"
    else:
        yield from _object(kind, value, path)


def _object(kind: str, value: Any, path: str) -> Iterator[str]:
    fields = _fields()[kind]
    if not isinstance(value, dict):
        yield f"{path}: {_shown(value)} is not an object; write its fields below it, indented"
        return
    for key, item in value.items():
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.6)
            yield f"{path}.{key}: is not a field of a {kind}" + (
                f"; did you mean {close[0]}?" if close else "; remove it"
            )
            continue
        found = list(_of_type(fields[key].rstrip("!"), item, f"{path}.{key}"))
        choices = _CHOICES.get((kind, key))
        is_default = item is None or (item == "" and (kind, key) not in _MUST_CHOOSE)
        if not found and choices and not is_default and item not in choices:
            found.append(f"{path}.{key}: {_shown(item)} is not allowed; use {', '.join(choices)}")
        yield from found
    if kind != "PodSpec":  # ours has its own containers
        for key, wanted in fields.items():
            if wanted.endswith("!") and value.get(key) is None:
                yield f"{path}.{key}: is missing; set it"


def _quantity(value: Any, path: str) -> Iterator[str]:
    try:
        amount(value if isinstance(value, str | int) and not isinstance(value, bool) else str(value))
        valid = not isinstance(value, bool | list | dict)
    except ValueError:
        valid = False
    if not valid:
        yield f"{path}: {_shown(value)} is not a quantity; write one such as 2, 500m, 16Gi"


def _string_map(value: Any, path: str) -> Iterator[str]:
    """Labels and annotations; the values of labels have a form of their own."""
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{path}: {_shown(value)} is not an object; write its fields below it, indented"
        return
    for key, item in value.items():
        if not isinstance(item, str):
            yield f'{path}[{key}]: {_shown(item)} is not text; write it in quotes: "{_shown(item)}"'
        elif path.endswith("labels") and not _LABEL_VALUE.fullmatch(item):
            yield f"{path}[{key}]: {_shown(item)} is no label value; use up to 63 letters, digits, -, _ and ."
        if not _LABEL_KEY.fullmatch(str(key)):
            yield f"{path}[{key}]: is no key; use up to 63 letters, digits, -, _ and ., after an optional domain and /"


def _resources(resources: Any, path: str) -> Iterator[str]:
    if not isinstance(resources, dict):
        return
    limits, requests = (_amounts(resources.get(kind)) for kind in ("limits", "requests"))
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, number in amounts.items():
            given = resources[kind][name]
            if "/" in name and number != int(number):
                yield f"{path}.{kind}[{name}]: {_shown(given)} is not a whole number; {name} cannot be shared"
            elif name == "memory" and number != int(number):
                yield f"{path}.{kind}[{name}]: {_shown(given)} is less than a byte; write such as 512Mi"
    for name, number in requests.items():
        given = resources["requests"][name]
        if name in limits and number > limits[name]:
            least = resources["limits"][name]
            yield f"{path}.requests[{name}]: {_shown(given)} is more than the limit {least}; lower it, or raise limits"
        elif "/" in name and limits.get(name) != number:
            yield f"{path}.requests[{name}]: {_shown(given)} must be set in limits too, to the same; set only limits"


def _amounts(quantities: Any) -> dict[str, Decimal]:
    """Those that are quantities."""
    found = {}
    for name, value in quantities.items() if isinstance(quantities, dict) else ():
        if isinstance(value, str | int) and not isinstance(value, bool):
            try:
                found[str(name)] = amount(value)
            except ValueError:
                continue
    return found


def _ranks(spec: Mapping[str, Any]) -> Iterator[str]:
    resources, ranks = spec.get("resources"), spec.get("procsPerNode")
    limits = _amounts(resources.get("limits")) if isinstance(resources, dict) else {}
    for name, count in limits.items():
        if name.endswith("/gpu") and isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > count > 0:
            yield f"spec.procsPerNode: {ranks} is more than the {count} {name} in limits; start at most one rank a GPU"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except TypeError:  # a key that JSON does not have, such as one of !!binary
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
