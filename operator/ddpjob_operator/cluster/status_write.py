"""Writes a job's status: only what differs, and only onto the very object that the decision was made from.

A merge patch of the status subresource carries the changed fields, null for those that are gone, and the
resourceVersion it was decided on. If somebody was quicker the server answers 409: the object is read again and
decided again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob_operator import metrics
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.cluster import paths
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.core.ledger.summary import with_summary
from ddpjob_operator.core.values.actions import Plan
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError

logger = logging.getLogger(__name__)

_PROGRESS = frozenset({"progress", "nodes", "snapshot", "goodput", "summary", "internal"})
_INTERNAL_PROGRESS = frozenset({"reportedSeconds", "nodeSeconds", "gpuSeconds"})
"""Fields that follow the training by the second. Alone they are not worth a write each time."""


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between a status on the server and the one that is wanted, as a merge patch (RFC 7386)."""

    patch: dict[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.patch

    @property
    def only_progress(self) -> bool:
        internal = (self.patch.get("internal") or {}).keys() <= _INTERNAL_PROGRESS
        return bool(self.patch) and self.patch.keys() <= _PROGRESS and internal


def change_between(current: Mapping[str, Any], wanted: DDPJobStatus) -> Change:
    """The change that turns the status on the server into the wanted one.

    An empty list or map that is the default, and that the server does not have, is no difference: a status that an
    older operator wrote is not written for the sake of fields that it did not know.
    """
    return Change(merge_patch_between(current, _without_defaults(current, wire_form(wanted), _DEFAULTS)))


def _without_defaults(
    current: Mapping[str, Any], wanted: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        name: _without_defaults(current.get(name) or {}, value, defaults.get(name) or {})
        if isinstance(value, Mapping)
        else value
        for name, value in wanted.items()
        if name in current or value not in ([], {}) or value != defaults.get(name)
    }


def wire_form(status: DDPJobStatus) -> dict[str, Any]:
    """The status as JSON, with its summary. What is empty is left out, as Go's omitempty would.

    Kubernetes 1.20 turns an empty string inside an array of a merge patch into null, and then refuses it.
    """
    wire: dict[str, Any] = _without_empty(
        with_summary(status).model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    return wire


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_empty(inner) for name, inner in value.items() if inner != ""}
    if isinstance(value, list):
        return [_without_empty(inner) for inner in value]
    return value


_DEFAULTS = wire_form(DDPJobStatus())


def merge_patch_between(current: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest merge patch from one JSON object to another. Arrays are replaced as a whole; null removes."""
    patch: dict[str, Any] = {name: None for name in current if name not in wanted}
    for name, value in wanted.items():
        before = current.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch_between(before, value):
                patch[name] = inner
        elif name not in current or before != value:
            patch[name] = value
    return patch


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A write without an answer: what it would have recorded. The object shows later whether it has."""

    version: str
    """Of the object that it was for."""
    before: DDPJobStatus
    decided: Plan

    def is_open(self, obj: Mapping[str, Any]) -> bool:
        """Whether `obj` does not show it yet; once it has changed, the write is on record or never will be."""
        return bool(obj["metadata"]["resourceVersion"] == self.version)

    def is_recorded(self, obj: Mapping[str, Any]) -> bool:
        return not self.is_open(obj) and change_between(obj.get("status") or {}, self.decided.status).empty


@dataclass(frozen=True, slots=True)
class StatusWriter:
    """Writes through one client, and lets the cache see the result at once."""

    client: Client
    cache: Cache

    async def write(self, key: Key, obj: Mapping[str, Any], change: Change) -> bool:
        """Write `change` onto `obj`.

        Returns:
            whether it was written; if not, `obj` was out of date and the cache now holds a newer one, or none.
        """
        metadata, doubts = obj["metadata"], self.cache.doubts
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": change.patch}
        try:
            written = await self.client.merge_patch(paths.job_status(*key), "ddpjobs/status", body)
        except ApiError as error:
            if error.object_is_gone:
                self.cache.drop_job(obj)
            elif error.conflict:
                await self._read_again(key, obj)
            else:
                raise
            return False
        metrics.STATUS_WRITES.labels(kind="progress" if change.only_progress else "change").inc()
        self.cache.confirm_job(written, doubts)
        return True

    async def is_current(self, key: Key, obj: Mapping[str, Any]) -> bool:
        """Read the job from the API server: whether `obj` is what it has. If not, the cache now holds a newer one, or
        none."""
        await self._read_again(key, obj)
        return self.cache.job(key) is obj

    async def _read_again(self, key: Key, obj: Mapping[str, Any]) -> None:
        """A watch may lag: it will bring the newer object, but not necessarily before the next decision."""
        if self.cache.job(key) is not obj:
            return  # it already has
        doubts = self.cache.doubts
        try:
            found = await self.client.get(f"{paths.jobs(key.namespace)}/{key.name}", "ddpjobs")
            self.cache.confirm_job(found, doubts)
        except ApiError as error:
            if not error.object_is_gone:
                raise
            self.cache.drop_job(obj)
