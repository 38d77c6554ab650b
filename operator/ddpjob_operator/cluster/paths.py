"""Paths of the collections that a job needs; with `runtime.paths`, all that the operator asks of the API."""

from __future__ import annotations

from ddpjob_operator.api import API_VERSION, PLURAL
from ddpjob_operator.runtime.paths import collection


def jobs(namespace: str | None) -> str:
    """DDPJobs of one namespace, or (None) of all."""
    return collection(API_VERSION, PLURAL, namespace)


def job_status(namespace: str, name: str) -> str:
    return f"{jobs(namespace)}/{name}/status"


def pods(namespace: str | None) -> str:
    """Pods of one namespace, or (None) of all."""
    return collection("v1", "pods", namespace)


def services(namespace: str) -> str:
    return collection("v1", "services", namespace)


def claims(namespace: str) -> str:
    return collection("v1", "persistentvolumeclaims", namespace)


def children(api_version: str, kind: str, namespace: str | None) -> tuple[str, str]:
    """The collection of objects of any kind in one namespace, or (None) in all, and its resource: networkpolicies.

    Kinds are made plural as the Kubernetes API conventions do.
    """
    plural = kind.lower()
    plural = f"{plural[:-1]}ies" if plural.endswith("y") else f"{plural}s"
    return collection(api_version, plural, namespace), plural
