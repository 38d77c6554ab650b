"""Paths of collections in the Kubernetes API."""

from __future__ import annotations


def collection(api_version: str, plural: str, namespace: str | None) -> str:
    """The objects of one kind in one namespace, or (None) in all."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    within = "" if namespace is None else f"/namespaces/{namespace}"
    return f"{root}{within}/{plural}"


def events(namespace: str) -> str:
    return collection("v1", "events", namespace)


def leases(namespace: str) -> str:
    return collection("coordination.k8s.io/v1", "leases", namespace)
