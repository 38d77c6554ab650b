"""The operator with one bug, for tests that must notice it: `python -m tests.api_server.seeded_bugs NAME`.

Each is harmless as long as nothing goes wrong, as bugs are that get into a release.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from ddpjob_operator import main
from ddpjob_operator.cluster import controller
from ddpjob_operator.cluster.apply import Applier
from ddpjob_operator.cluster.status_write import StatusWriter
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.values.actions import Plan, PointService
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.runtime.client import Json
from ddpjob_operator.runtime.errors import ApiError


def counts_each_decision() -> None:
    """A restart is counted when it is decided, and once more when it has to be decided again."""
    decided: Counter[str] = Counter()

    def plan(job: Job, *rest: Any) -> Plan:
        found = policy.plan(job, *rest)
        if found.status.restarts == job.status.restarts:
            return found
        decided[job.uid] += 1
        return replace(found, status=found.status.model_copy(update={"restarts": decided[job.uid]}))

    controller.plan = plan


def acts_before_it_writes_again() -> None:
    """Where the API server has a newer job, the new attempt is made first, and then put on record."""
    write = controller.Controller._write

    async def _write(self: controller.Controller, view: Any, decided: Plan) -> bool:
        if await write(self, view, decided):
            return True
        if not decided.status_first:
            return False
        await self._applier.carry_out(view.job, decided.actions)
        return await write(self, replace(view, obj=self.cache.job(view.key)), decided)

    controller.Controller._write = _write  # type: ignore[method-assign]


def repeats_a_creation_under_another_name() -> None:
    """As one does whose pods have generated names: no answer means that there is no pod."""
    create = Applier._create

    async def _create(self: Applier, collection: str, resource: str, manifest: Json) -> Json:
        try:
            return await create(self, collection, resource, manifest)
        except ApiError as error:
            if error.status or resource != "pods":
                raise
        metadata = manifest["metadata"] | {"name": f"{manifest['metadata']['name']}-again"}
        return await create(self, collection, resource, manifest | {"metadata": metadata})

    Applier._create = _create  # type: ignore[method-assign]


def points_the_service_as_an_attempt_begins() -> None:
    """And never later: who takes over an attempt does not ask where the Service points to."""

    def plan(job: Job, *rest: Any) -> Plan:
        found = policy.plan(job, *rest)
        if found.status.attempt != job.status.attempt:
            return found
        kept = tuple(action for action in found.actions if not isinstance(action, PointService))
        return replace(found, actions=kept)

    controller.plan = plan


def believes_what_it_was_told() -> None:
    """A job that was listed is not read again before its pods are touched."""

    async def is_current(self: StatusWriter, *_: Any) -> bool:
        return True

    StatusWriter.is_current = is_current  # type: ignore[method-assign]


BUGS = {
    bug.__name__: bug
    for bug in (
        counts_each_decision,
        acts_before_it_writes_again,
        repeats_a_creation_under_another_name,
        points_the_service_as_an_attempt_begins,
        believes_what_it_was_told,
    )
}

if __name__ == "__main__":
    BUGS[sys.argv.pop()]()
    sys.exit(main.main())
