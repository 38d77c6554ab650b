"""A job that is within the administrator's bounds. Every manifest is made from one, so no path can forget the check."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.core.values.job import Defaults, Job, Manifest


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that `manifests.admission`, and nothing else, has admitted, with the defaults of its namespace."""

    job: Job
    defaults: Defaults

    def owner_reference(self) -> Manifest:
        """Makes the garbage collector remove a child after its job. It does not block the job's deletion."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.job.name,
            "uid": self.job.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A job that is beyond a bound, with a message for each bound: field, value and bound."""

    problems: tuple[str, ...]
