"""One look at a job: all that a decision is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.names import pod_name
from ddpjob_operator.core.values.observed import Observed, PodView

_WITH_A_GANG = (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING)


@dataclass(frozen=True)
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

    @cached_property
    def gang(self) -> tuple[PodView, ...]:
        """The pods of the current attempt, one for each node rank that it has.

        Of several with the same labels that counts which was created for the rank; or else, which was kept for it. One
        that is on record as lost makes way for any other.
        """
        gang: dict[int, PodView] = {}
        attempt, size = self.status.attempt, self.gang_size
        for pod in self.observed.pods:
            rank = pod.node_rank
            if pod.attempt != attempt or rank is None or rank >= size:
                continue
            if rank not in gang or self._claim(pod) > self._claim(gang[rank]):
                gang[rank] = pod
        return tuple(gang[rank] for rank in sorted(gang))

    def _claim(self, pod: PodView) -> int:
        if pod.uid in self.status.internal.lost_pods:
            return -1
        created = pod.name == pod_name(self.job.name, self.status.attempt, pod.node_rank or 0)
        return 2 if created else int(self.status.internal.kept_pods.get(pod.name) == pod.node_rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pods of the current attempt, by node rank."""
        kept: dict[int, str] = {}
        for name, rank in self.status.internal.kept_pods.items():
            kept.setdefault(rank, name)
        job, attempt = self.job.name, self.status.attempt
        return tuple(kept.get(rank) or pod_name(job, attempt, rank) for rank in range(self.gang_size))

    @property
    def gang_size(self) -> int:
        """Nodes of the attempt in progress; a spec edited since its pods were first made does not change it.

        Nor does the loss of the other records of a gang that is there, as where another version has written them.
        """
        recorded = self.status.internal.spec_digests is not None or self.status.phase in _WITH_A_GANG
        return (self.status.nodes.total if recorded else 0) or self.job.spec.nodes

    def seconds_until(self, moment: datetime) -> float:
        return (moment - self.now).total_seconds()

    def seconds_since(self, moment: datetime) -> float:
        return (self.now - moment).total_seconds()
