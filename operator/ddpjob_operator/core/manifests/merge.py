"""Merging one Kubernetes object over another, as its strategic merge patch does for the fields that a pod has."""

from __future__ import annotations

from typing import Any

from ddpjob_operator.core.values.job import Manifest

_CONTAINERS = ("containers", "initContainers")


def merge(base: Manifest, over: Manifest) -> Manifest:
    """`over` merged into `base`: objects by key, lists of named things by name, everything else replaced.

    Lists are matched by the key that Kubernetes' strategic merge uses for them: `name`, or `mountPath` for volume
    mounts and `containerPort` for ports. A null removes what is no list, and `[]` leaves nothing of a list that is not
    matched so.
    """
    merged = dict(base)
    for key, value in over.items():
        present = merged.get(key)
        if value is None:
            if not isinstance(present, list):
                merged.pop(key, None)
        elif isinstance(present, dict) and isinstance(value, dict):
            merged[key] = merge(present, value)
        elif isinstance(present, list) and isinstance(value, list) and (by := _merge_key(key)):
            merged[key] = _merge_list(present, value, by, deep=key in _CONTAINERS)
        else:
            merged[key] = value
    return merged


def _merge_key(field: str) -> str | None:
    if field in (*_CONTAINERS, "volumes", "env", "imagePullSecrets"):
        return "name"
    return {"volumeMounts": "mountPath", "ports": "containerPort"}.get(field)


def _merge_list(base: list[Any], over: list[Any], by: str, *, deep: bool) -> list[Any]:
    """Containers are merged; a volume or a variable has one source, so a later one replaces it whole."""
    merged = {item.get(by): item for item in base}
    for item in over:
        present = merged.get(item.get(by))
        merged[item.get(by)] = merge(present, item) if deep and present else item
    return list(merged.values())
