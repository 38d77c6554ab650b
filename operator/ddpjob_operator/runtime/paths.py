"""Paths of collections in the Kubernetes API, and names that may follow them."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of an object. Anything else in a path may lead to another one: by `..`, as a subresource, or as a query."""
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def collection(api_version: str, plural: str, namespace: str | None) -> str:
    """The objects of one kind in one namespace, or (None) in all."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    within = "" if namespace is None else f"/namespaces/{namespace}"
    return f"{root}{within}/{plural}"


def events(namespace: str) -> str:
    return collection("v1", "events", namespace)


def leases(namespace: str) -> str:
    return collection("coordination.k8s.io/v1", "leases", namespace)


def namespace_of(path: str) -> str:
    """The namespace that a path of the API is in; empty for what is in none."""
    _, found, rest = path.partition("/namespaces/")
    return rest.partition("/")[0] if found else ""
