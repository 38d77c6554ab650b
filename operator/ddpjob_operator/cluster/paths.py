"""Paths of the collections that the operator uses; the whole of its reach into the API."""

from __future__ import annotations

from ddpjob_operator.api import GROUP, PLURAL, VERSION


def jobs(namespace: str | None) -> str:
    """DDPJobs of one namespace, or (None) of all."""
    return f"/apis/{GROUP}/{VERSION}{_within(namespace)}/{PLURAL}"


def job_status(namespace: str, name: str) -> str:
    return f"{jobs(namespace)}/{name}/status"


def pods(namespace: str | None) -> str:
    """Pods of one namespace, or (None) of all."""
    return f"/api/v1{_within(namespace)}/pods"


def services(namespace: str) -> str:
    return f"/api/v1{_within(namespace)}/services"


def claims(namespace: str) -> str:
    return f"/api/v1{_within(namespace)}/persistentvolumeclaims"


def children(api_version: str, kind: str, namespace: str) -> tuple[str, str]:
    """The collection of objects of any kind in a namespace, and its resource, such as networkpolicies.

    Kinds are made plural as the Kubernetes API conventions do.
    """
    plural = kind.lower()
    plural = f"{plural[:-1]}ies" if plural.endswith("y") else f"{plural}s"
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    return f"{root}{_within(namespace)}/{plural}", plural


def events(namespace: str) -> str:
    return f"/api/v1{_within(namespace)}/events"


def leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1{_within(namespace)}/leases"


def _within(namespace: str | None) -> str:
    return "" if namespace is None else f"/namespaces/{namespace}"
