"""One look at a job: all that a decision is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import Observed, PodView


@dataclass(frozen=True, slots=True)
class Look:
    """A job, what was observed of its children, the time, and the defaults of its namespace.

    `status` is the status as decided so far; `job.status` is the one on record.
    """

    job: Job
    observed: Observed
    now: datetime
    defaults: Defaults
    status: DDPJobStatus

    def with_status(self, status: DDPJobStatus) -> Look:
        """The same look, with another status decided."""
        return replace(self, status=status)

    @property
    def gang(self) -> tuple[PodView, ...]:
        """The pods that have a node rank in the current attempt."""
        attempt = self.status.attempt
        return tuple(pod for pod in self.observed.pods if pod.attempt == attempt and pod.node_rank is not None)

    @property
    def gang_size(self) -> int:
        """Nodes of the attempt in progress; a spec edited since its pods were first made does not change it."""
        recorded = self.status.internal.spec_digests is not None
        return (self.status.nodes.total if recorded else 0) or self.job.spec.nodes

    def seconds_until(self, moment: datetime) -> float:
        return (moment - self.now).total_seconds()

    def seconds_since(self, moment: datetime) -> float:
        return (self.now - moment).total_seconds()
