"""Where a gang waits in Kueue, made of what Kueue's API answers.

Kueue makes one Workload of a pod group, under the group's name, once all pods of the group are there; the Workload's
condition QuotaReserved says what it lacks. The place of a Workload is in Kueue's visibility API, which counts from 0
and lists at most 1000 of a queue unless it is asked for more (https://kueue.sigs.k8s.io, "Pending Workloads
on-demand").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.core.manifests.pod_group import KUEUE_COUNT, KUEUE_GATE, KUEUE_QUEUE
from ddpjob_operator.core.values.names import KUEUE_GROUP
from ddpjob_operator.follow.table import printable
from ddpjob_operator.runtime.errors import ApiError

Json = dict[str, Any]

WORKLOADS = "kueue.x-k8s.io"
VISIBILITY = "visibility.kueue.x-k8s.io"
"""API groups of Kueue."""

_FORBIDDEN = 403
_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Group:
    """A pod group that Kueue holds back."""

    namespace: str
    name: str
    """That of its Workload too."""
    queue: str
    """The LocalQueue."""
    pods: str
    """How many belong to it."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A gang in a queue of Kueue."""

    queue: str
    place: str = ""
    """Such as `place 3 of 7 (place 12 in the cluster queue)`; empty where it is not known."""
    said: str = ""
    """Why it waits, in Kueue's words."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what to do about it."""

    @property
    def waits(self) -> str:
        """Half a sentence."""
        return f"waits in Kueue's queue {self.queue}{f': {self.place}' if self.place else ''}"


def group_held_back(pods: Iterable[Json]) -> Group | None:
    """The pod group of which Kueue holds a pod; None if it holds none."""
    for pod in pods:
        metadata, gates = pod["metadata"], (pod.get("spec") or {}).get("schedulingGates") or ()
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        if "deletionTimestamp" in metadata or KUEUE_GROUP not in labels:
            continue
        if any(gate.get("name") == KUEUE_GATE for gate in gates):
            count = annotations.get(KUEUE_COUNT, "")
            return Group(metadata["namespace"], labels[KUEUE_GROUP], labels.get(KUEUE_QUEUE, ""), count)
    return None


def queued_of(group: Group, workload: Json | ApiError, pending: Json | ApiError) -> Queued:
    """The group by its Workload and the Workloads that wait in its queue, or by why these cannot be read."""
    return Queued(
        group.queue,
        place="" if isinstance(pending, ApiError) else _place(group, pending),
        said="" if isinstance(workload, ApiError) else _said(workload),
        notes=_notes(group, workload, pending),
    )


def is_not_served(answer: Json | ApiError) -> bool:
    """Whether the API server has no such group or version, as opposed to no such object, which its answer names."""
    return isinstance(answer, ApiError) and answer.not_found and not answer.details.get("name")


def _place(group: Group, pending: Json) -> str:
    items = pending.get("items") or ()
    more = " or more" if len(items) >= _MOST_LISTED else ""
    for item in items:
        if (item.get("metadata") or {}).get("name") == group.name:
            local, cluster = item["positionInLocalQueue"] + 1, item["positionInClusterQueue"] + 1
            return f"place {local} of {len(items)}{more} (place {cluster} in the cluster queue)"
    return f"behind the first {len(items)}" if more else ""  # else it is about to be admitted, or it is deactivated


def _said(workload: Json) -> str:
    status = workload.get("status") or {}
    conditions: Mapping[str, Json] = {item.get("type", ""): item for item in status.get("conditions") or ()}
    reserved = conditions.get("QuotaReserved", {})
    if reserved.get("status") != "True":
        return printable(reserved.get("message") or "")
    waits = [check for check in status.get("admissionChecks") or () if check.get("state") != "Ready"]
    checks = ", ".join(
        printable(f"{check.get('name')}: {check.get('message') or check.get('state')}") for check in waits
    )
    return f"its quota is reserved; admission checks that are not ready: {checks}" if checks else ""


def _notes(group: Group, workload: Json | ApiError, pending: Json | ApiError) -> tuple[str, ...]:
    if is_not_served(workload):
        return (
            f"The cluster does not serve Workloads of {WORKLOADS}, so nothing admits these pods: install Kueue, or "
            "apply the job without scheduling.gang Kueue.",
        )
    answers = ((workload, f"workloads of {WORKLOADS}"), (pending, f"localqueues/pendingworkloads of {VISIBILITY}"))
    rights = [right for answer, right in answers if isinstance(answer, ApiError) and answer.status == _FORBIDDEN]
    refused = f"ask for get on {' and '.join(rights)}, which Kueue's ClusterRole kueue-batch-user-role has."
    found = (
        f"What Kueue says of it cannot be read: {refused}" if rights else "",
        _why_no_workload(group, workload),
        _why_no_place(group, pending),
    )
    return tuple(note for note in found if note)


def _why_no_workload(group: Group, answer: Json | ApiError) -> str:
    if not isinstance(answer, ApiError) or answer.status == _FORBIDDEN:
        return ""
    if answer.not_found:
        return (
            f"Kueue has no Workload {group.name} yet: it makes one when all {group.pods} pods of the group are there, "
            f"if its integration of pods covers namespace {group.namespace}."
        )
    return f"Its Workload cannot be read: {printable(answer.message)}"


def _why_no_place(group: Group, answer: Json | ApiError) -> str:
    if not isinstance(answer, ApiError) or answer.status == _FORBIDDEN:
        return ""
    if is_not_served(answer):
        return f"Its place is not known: the cluster does not serve Kueue's visibility API, {VISIBILITY}."
    if answer.not_found:
        return (
            f"Kueue has no LocalQueue {group.queue} in namespace {group.namespace} that leads to a "
            "ClusterQueue: create it, or correct spec.scheduling.queue."
        )
    return f"Its place is not known, as Kueue's visibility API answers: {printable(answer.message)}"
