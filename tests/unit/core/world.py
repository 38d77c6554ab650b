"""An operator on top of a small cluster that can be hurt in every way that the real one can.

It does with a plan what `cluster/controller.py` does: status first where the plan says so, then the actions, again
until nothing is left to do, then the status. Between any two calls it can be killed, any answer can be lost, and what
it sees of the pods can be old.

The cluster's `history` is what `promises.check_history` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from builders import DEFAULTS, make_job
from small_cluster import ENDED, PROGRESS, Cluster

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.gang.creation import counted
from ddpjob_operator.core.values.actions import (
    Action,
    AssignPod,
    CreateChild,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    Plan,
    PointService,
    ReadLog,
    ReadWarnings,
    ReleasePod,
)
from ddpjob_operator.core.values.job import Job, Problem
from ddpjob_operator.core.values.observed import Creations, Observed, PodView, PodWarning, ServiceView

Decide = Callable[..., Plan]
LONGEST_CHAIN = 16


class Crash(Exception):
    """The operator's process dies here."""


class LostReply(Exception):
    """The call was applied, but its answer never came."""


@dataclass
class Operator:
    """One process of the operator. A new one knows of the Service only what it asks for."""

    cluster: Cluster
    decide: Decide = policy.plan
    service: ServiceView | None = None
    problem: Problem | None = None
    logs: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, PodWarning] = field(default_factory=dict)
    pods: tuple[PodView, ...] | None = None
    """An old picture of the pods, or None while the watch is up to date."""
    job: tuple[Job, int] | None = None
    """An old picture of the job and its version, likewise."""
    confirmed: bool = False
    """Whether it has read or written the job."""
    creations: dict[str, Creations] = field(default_factory=dict)
    kill_after: int | None = None
    lose_after: int | None = None
    last_write: datetime | None = None
    wait: float | None = None

    def look(self) -> bool:
        """One pass; whether it came to rest."""
        for _ in range(LONGEST_CHAIN):
            job, version = self.job or (self.cluster.job, self.cluster.version)
            seen = self._observed()
            decided = self.decide(job, seen, self.cluster.now, DEFAULTS)
            self.wait = decided.requeue_after
            if decided.confirm_first:
                self.job, self.confirmed = None, True
                if version != self.cluster.version:
                    continue
            if decided.status_first and not self._write(decided, job, version):
                continue
            blocked = self.problem is not None and not self.problem.final
            if blocked:
                self.problem = None
            if decided.actions:
                stalled, logs_lost = self.pods is not None, len(self.cluster.logs_lost)
                try:
                    refusals = [problem for action in decided.actions if (problem := self._do(action))]
                finally:
                    if stalled:  # it could not know that a pod had ended
                        del self.cluster.logs_lost[logs_lost:]
                if refusals:
                    self.problem = refusals[0]
                    seen = self._observed()
                    job, version = self.job or (self.cluster.job, self.cluster.version)
                    decided = self.decide(job, seen, self.cluster.now, DEFAULTS)
                    self._write(decided, job, version)
                    return True
            elif not blocked:
                return decided.status_first or self._may_wait(job, decided) or self._write(decided, job, version)
        raise AssertionError(f"{LONGEST_CHAIN} plans in a row did not come to rest: {decided}")

    def undisturbed(self) -> None:
        """No call fails any more, and every watch is up to date."""
        self.kill_after = self.lose_after = self.pods = self.job = None

    def _observed(self) -> Observed:
        fetchers = self.cluster.fetchers.values()
        return Observed(
            self._seen(),
            self.service,
            service_exists=self.cluster.service is not None,
            pvc_exists=self.cluster.claim,
            report=self.cluster.report,
            problem=self.problem,
            children=frozenset(self.cluster.children),
            pod_groups=frozenset(self.cluster.pod_groups),
            logs=dict(self.logs),
            warnings=dict(self.warnings),
            initializer=max(fetchers, key=lambda pod: pod.number, default=None),
            creations=dict(self.creations),
            status_confirmed=self.confirmed,
        )

    def _seen(self) -> tuple[PodView, ...]:
        return tuple(self.cluster.pods.values()) if self.pods is None else self.pods

    def _may_wait(self, job: Job, decided: Plan) -> bool:
        before, after = job.status.model_dump(), decided.status.model_dump()
        changed = {name for name in after if after[name] != before[name]}
        return bool(changed) and changed <= PROGRESS and self.last_write is not None

    def _write(self, decided: Plan, job: Job, version: int) -> bool:
        if decided.status == job.status:
            return True
        self._before_call()
        written = self.cluster.write_status(decided.status, version)
        self._after_call()
        self.job, self.confirmed = None, True  # the answer, or the read after a conflict, carries what is true now
        self.last_write = self.cluster.now
        return written

    def _do(self, action: Action) -> Problem | None:
        seen = self.job is None and self.cluster.job.deleting
        assert not (seen and isinstance(action, DeleteJob)), "a job is deleted again that is seen to be deleted"
        self._before_call()
        problem = self.cluster.apply(action)
        self._after_call()
        if problem is None and (name := _created(action)) is not None:
            self.creations[name] = counted(self.creations.get(name), self.cluster.now)
        match action:
            case CreateService() | PointService():
                self.service = self.cluster.service
            case ReadLog(uid=uid):
                self.logs[uid] = "the last line"
            case ReadWarnings(uid=uid):
                self.warnings[uid] = PodWarning(self.cluster.now, "FailedMount", "a volume")
            case CreatePod() | DeletePod() | ReleasePod() | AssignPod():
                self.pods = None  # the answer carries what is true now
            case DeleteJob():
                self.job = None  # likewise
        return problem

    def _before_call(self) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                raise Crash

    def _after_call(self) -> None:
        if self.lose_after is not None:
            self.lose_after -= 1
            if self.lose_after < 0:
                self.lose_after = None
                raise LostReply


def _created(action: Action) -> str | None:
    """Name of the pod that an action creates."""
    match action:
        case CreatePod(name):
            return name
        case CreateChild(manifest) if manifest["kind"] == "Pod":
            return str(manifest["metadata"]["name"])
        case _:
            return None


@dataclass
class World:
    """A cluster and whoever operates it, step by step."""

    cluster: Cluster
    decide: Decide = policy.plan
    operator: Operator = field(init=False)

    def __post_init__(self) -> None:
        self.operator = Operator(self.cluster, self.decide)

    @staticmethod
    def start(decide: Decide = policy.plan, **spec: object) -> World:
        return World(Cluster(make_job(**spec)), decide)

    def look(self) -> None:
        try:
            self.operator.look()
        except Crash:
            self.restart()
        except LostReply:
            pass  # the queue tries again

    def restart(self) -> None:
        self.operator = Operator(self.cluster, self.decide)

    def pass_time(self, seconds: float) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    def settle(self, limit: float = 3600.0) -> None:
        """Let the operator work, undisturbed, until it has nothing more to do or wait for."""
        self.operator.undisturbed()
        until = self.cluster.now + timedelta(seconds=limit)
        for _ in range(10_000):
            before = len(self.cluster.history)
            self.look()
            if len(self.cluster.history) > before:
                continue
            waiting = [name for name in self.cluster.pods if self.cluster.is_stopping(name)]
            if self.cluster.job.status.phase in (Phase.SUCCEEDED, Phase.FAILED) and not waiting:
                return
            starting = [name for name in self.cluster.pods if self.cluster.can_run(name)]
            fetchers = self.cluster.fetchers
            going = [name for name, pod in fetchers.items() if pod.deleting]
            fetching = [name for name, pod in fetchers.items() if pod.phase not in ENDED and not pod.deleting]
            if going:
                self.cluster.delete_fetcher(going[0])
            elif fetching:
                self.cluster.fetch(0)
            elif waiting:
                self.cluster.reap(waiting[0])
            elif starting:
                self.cluster.run(starting[0])
            elif self.operator.wait is not None and self.cluster.now < until:
                self.pass_time(max(self.operator.wait, 0.5))
            else:
                return
        raise AssertionError("it never comes to rest")

    def finish(self) -> DDPJobStatus:
        """Nothing bad happens any more: every pod runs and ends well."""
        self.cluster.suspend(False)
        self.cluster.mend()
        for _ in range(50):
            self.settle()
            if self.status.phase in (Phase.SUCCEEDED, Phase.FAILED):
                return self.status
            if self.status.phase is Phase.RUNNING:
                assert self.cluster.lacks() == [], "what somebody deletes is created again"
            if self.status.phase is Phase.RUNNING and self.cluster.job.spec.elastic is not None:
                assert self.status.nodes.total == self.cluster.job.spec.nodes, "every node could be had by now"
            for name, pod in list(self.cluster.pods.items()):
                self.cluster.hear(name)
                if pod.attempt == self.status.attempt and pod.node_rank is not None:
                    self.cluster.end(name, 0, "Completed")
        raise AssertionError(f"it never ends: {self.status}")

    @property
    def status(self) -> DDPJobStatus:
        return self.cluster.job.status
