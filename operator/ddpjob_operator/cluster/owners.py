"""Whose an object is: the job that it belongs to, and the key under which that job is looked at.

A job is known by two names. Its key leads to whatever job has that name now; its owner is that one job and no later one
of the same name. What has lost its owner may still have the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddpjob_operator.api import KIND
from ddpjob_operator.core.values.names import LABEL_JOB

Json = Mapping[str, Any]


class Key(NamedTuple):
    """A DDPJob by name, which is what the queue holds: a new job of the same name is looked at in the same order."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Owner(NamedTuple):
    """The job that a pod belongs to, by its controller; the garbage collector takes none from another namespace."""

    namespace: str
    uid: str


def owner_of(child: Json) -> Owner | None:
    """The job whose child an object is: by its controller, which the API server guards, never by a label."""
    uid = controller_of(child).get("uid")
    return Owner(child["metadata"]["namespace"], uid) if uid else None


def key_of_pod(pod: Json) -> Key:
    """The key of the job that a pod belongs to, or to an earlier job of the same name. A label is enough to look at a
    job: a pod that has just lost its controller has nothing else. It may be a shortened name, for which the cache knows
    the whole one. No job has the name of one without either: empty."""
    meta = pod["metadata"]
    name = controller_of(pod).get("name") or (meta.get("labels") or {}).get(LABEL_JOB)
    return Key(meta["namespace"], name or "")


def controller_of(obj: Json) -> Mapping[str, Any]:
    """The owner reference to the DDPJob that an object belongs to; empty if there is none."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == KIND:
            found: Mapping[str, Any] = reference
            return found
    return {}
