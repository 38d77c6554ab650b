"""A small cluster in memory, and an operator on top of it that can be hurt in every way that the real one can.

The cluster applies calls as the API server does (names are unique, a deletion names a uid, a status write names a
resourceVersion) and keeps a history. The operator does with a plan what `cluster/controller.py` does: status first
where the plan says so, then the actions, again until nothing is left to do, then the status. Between any two calls it
can be killed, any answer can be lost, and what it sees of the pods can be old.

`history` is what `promises.check_history` checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count

from builders import DEFAULTS, NOW, UID, later, make_job, make_report

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import plan as policy
from ddpjob_operator.core.model import (
    Action,
    AssignPod,
    CreateChild,
    CreateClaim,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    InitializerView,
    Job,
    Observed,
    Plan,
    PodPhase,
    PodView,
    PointService,
    Problem,
    ReadLog,
    ReadWarnings,
    ServiceView,
    Termination,
    Warned,
)

Decide = Callable[..., Plan]
NODES = ("node-0", "node-1", "node-2")
ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)
PROGRESS = {"progress", "nodes", "snapshot", "goodput"}
LONGEST_CHAIN = 16
POD_GRACE_SECONDS = 60


class Crash(Exception):
    """The operator's process dies here."""


class LostReply(Exception):
    """The call was applied, but its answer never came."""


@dataclass
class Cluster:
    """The truth: one job and its children."""

    job: Job
    now: datetime = NOW
    version: int = 1
    pods: dict[str, PodView] = field(default_factory=dict)
    service: ServiceView | None = None
    claim: bool = False
    quota: int | None = None
    """Pods that the namespace may hold."""
    deleted: list[datetime] = field(default_factory=list)
    """When the job was deleted."""
    history: list[object] = field(default_factory=list)
    statuses: list[DDPJobStatus] = field(default_factory=list)
    heard: dict[str, int] = field(default_factory=dict)
    """By uid, the attempt that a pod itself knows of: the kubelet takes a moment to tell it of its labels."""
    silent: set[str] = field(default_factory=set)
    capacity: int | None = None
    """Pods that there is room for on all nodes together."""
    report: dict[str, object] | None = None
    """What node rank 0 said last."""
    fetchers: dict[str, InitializerView] = field(default_factory=dict)
    """The pods that put data on the volume."""
    children: set[tuple[str, str]] = field(default_factory=set)
    live: list[tuple[str, ...]] = field(default_factory=list)
    """After each change, which pods were alive."""
    _uids: count[int] = field(default_factory=lambda: count(1))
    _steps: count[int] = field(default_factory=lambda: count(11))

    def write_status(self, status: DDPJobStatus, version: int) -> bool:
        if version != self.version:
            return False
        # what comes back from an API server went through JSON
        status = DDPJobStatus.model_validate_json(status.model_dump_json(by_alias=True, exclude_none=True))
        self.job, self.version = replace(self.job, status=status), self.version + 1
        self.history.append(status)
        self.statuses.append(status)
        return True

    def apply(self, action: Action) -> Problem | None:
        self.history.append(action)
        match action:
            case CreateClaim():
                self.claim = True
            case CreateService(manifest):
                attempt = int(manifest["spec"]["selector"]["training.ddpjob.io/attempt"])
                self.service = self.service or ServiceView("10.96.0.7", attempt)
            case PointService(attempt=attempt):
                assert self.service is not None, "a patch of a Service that is not there"
                self.service = replace(self.service, attempt=attempt)
            case CreatePod(name, attempt, node_rank, manifest):
                return self._create(name, attempt, node_rank, manifest["metadata"]["labels"])
            case AssignPod(name, uid, attempt, node_rank, nodes):
                if name in self.pods and self.pods[name].uid == uid:
                    self._set(name, attempt=attempt, node_rank=node_rank, nodes=nodes)
            case DeletePod(name, uid) if name in self.fetchers:
                self.delete_fetcher(name, uid=uid)
            case DeletePod(name, uid, grace):
                self.delete(name, grace, uid=uid)
            case CreateChild(manifest) if manifest["kind"] == "Pod":
                metadata = manifest["metadata"]
                number = int(metadata["labels"]["training.ddpjob.io/attempt"])
                fetcher = InitializerView(metadata["name"], f"uid-{next(self._uids)}", PodPhase.PENDING, number)
                self.fetchers.setdefault(metadata["name"], fetcher)
            case CreateChild(manifest):
                self.children.add((manifest["kind"], manifest["metadata"]["name"]))
            case DeleteJob():
                # a finalizer of somebody's holds it, so that it can be seen whether it is left alone
                self.job, self.version = replace(self.job, deleting=True), self.version + 1
                self.deleted.append(self.now)
        return None

    def fetch(self, exit_code: int) -> None:
        """The initializers that run come to their end."""
        for name, pod in self.fetchers.items():
            if pod.phase not in ENDED:
                phase = PodPhase.FAILED if exit_code else PodPhase.SUCCEEDED
                self.fetchers[name] = replace(pod, phase=phase, termination=Termination(exit_code))
                self.history.append((name, exit_code))

    def delete_fetcher(self, name: str, *, uid: str | None = None) -> None:
        """At once if it has ended; else it is told to, and its kubelet takes its time."""
        pod = self.fetchers[name]
        if uid is not None and pod.uid != uid:
            return
        if pod.phase in ENDED or pod.deleting:
            del self.fetchers[name]
        else:
            self.fetchers[name] = replace(pod, deleting=True, gone_by=self.now + timedelta(seconds=10))

    def _create(self, name: str, attempt: int, node_rank: int | None, labels: dict[str, str]) -> Problem | None:
        if name in self.pods:
            return None
        if self.quota is not None and len(self.pods) >= self.quota:
            return Problem("QuotaExceeded", "exceeded quota: pods")
        uid = f"uid-{next(self._uids)}"
        nodes = labels.get("training.ddpjob.io/nodes")
        self.pods[name] = PodView(name, uid, attempt, node_rank, PodPhase.PENDING, nodes=nodes and int(nodes))
        self.heard[uid] = attempt
        self._changed()
        return None

    def schedule(self, name: str) -> None:
        """The pod is given a node that answers, if there is one."""
        pod, nodes = self.pods[name], [node for node in NODES if node not in self.silent]
        if pod.phase is PodPhase.PENDING and not (pod.scheduled or pod.deleting) and nodes and self.has_room():
            load = Counter(other.node_name for other in self.pods.values())
            self._set(name, scheduled=True, node_name=min(nodes, key=lambda node: (load[node], node)))

    def run(self, name: str) -> None:
        self.schedule(name)
        pod = self.pods[name]
        if pod.phase is PodPhase.PENDING and pod.scheduled and not pod.deleting and self.answers(name):
            self._set(name, phase=PodPhase.RUNNING, pod_ip="10.0.0.1", ready=True, ready_since=self.now)
            self.hear(name)

    def hear(self, name: str) -> None:
        """The pod learns of its labels."""
        if self.answers(name):
            self.heard[self.pods[name].uid] = self.pods[name].attempt

    def mend(self) -> None:
        """Whatever is wrong with the cluster is over."""
        self.quota = self.capacity = None
        for node in tuple(self.silent):
            self.come_back(node)

    def has_room(self) -> bool:
        placed = [pod for pod in self.pods.values() if pod.scheduled and pod.phase not in ENDED]
        return self.capacity is None or len(placed) < self.capacity

    def save(self) -> None:
        """Node rank 0 tells of a snapshot."""
        first = next((pod for pod in self.pods.values() if pod.node_rank == 0 and pod.phase is PodPhase.RUNNING), None)
        if first is not None and self.answers(first.name):
            step = next(self._steps)
            snapshot = {"step": step, "time": self.now.timestamp(), "verified": True}
            self.report = {"uid": UID, "attempt": self.heard[first.uid], "step": step, "snapshot": snapshot}

    def can_run(self, name: str) -> bool:
        pod = self.pods[name]
        placeable = self.answers(name) if pod.scheduled else len(self.silent) < len(NODES) and self.has_room()
        return pod.phase is PodPhase.PENDING and not pod.deleting and placeable

    def answers(self, name: str) -> bool:
        """Whether a pod's node is there to do and say anything about it."""
        return self.pods[name].node_name not in self.silent

    def fall_silent(self, node: str) -> None:
        """A node dies, or only its kubelet. The control plane notices, and marks what ran there not ready."""
        self.silent.add(node)
        for name, pod in self.pods.items():
            if pod.node_name == node and pod.phase is PodPhase.RUNNING:
                self._set(name, ready=False, ready_since=None, not_ready_since=pod.not_ready_since or self.now)

    def come_back(self, node: str) -> None:
        """Its kubelet tells again what became of its pods."""
        self.silent.discard(node)
        for name, pod in self.pods.items():
            if pod.node_name == node:
                running = pod.phase is PodPhase.RUNNING
                self._set(name, not_ready_since=None, ready=running, ready_since=self.now if running else None)

    def end(self, name: str, exit_code: int, reason: str = "", *, skew: float = 0.0) -> None:
        """The trainer of a pod that runs comes to its end."""
        if self.pods[name].phase is not PodPhase.RUNNING or not self.answers(name):
            return
        told = {"time": self.now.timestamp(), "step": 10, "attempt": self.heard[self.pods[name].uid]}
        message = make_report(reason, **told) if reason else ""
        at = (self.now + timedelta(seconds=skew)).replace(microsecond=0)
        phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
        self._set(name, phase=phase, termination=Termination(exit_code, message=message, finished_at=at))

    def evict(self, name: str) -> None:
        """The kubelet ends a pod because its node ran short of something."""
        if self.pods[name].phase is PodPhase.RUNNING:
            self._set(name, phase=PodPhase.FAILED, reason="Evicted", message="The node was low on resource: memory.")

    def delete(self, name: str, grace: float | None, *, uid: str | None = None) -> None:
        pod, grace = self.pods.get(name), POD_GRACE_SECONDS if grace is None else grace
        if pod is None or (uid is not None and pod.uid != uid):
            return
        if grace == 0 or pod.phase is PodPhase.PENDING:
            del self.pods[name]
            self._changed()
        elif not pod.deleting:
            self._set(name, deleting=True, gone_by=self.now + timedelta(seconds=grace))

    def reap(self, name: str) -> None:
        """The kubelet is done with a pod that was deleted."""
        if self.pods[name].deleting and self.answers(name):
            del self.pods[name]
            self._changed()

    def edit(self, **spec: object) -> None:
        """The spec is changed, on a server that does not know the rules in CEL."""
        fields = self.job.spec.model_dump(by_alias=True, exclude_none=True) | spec
        self.job = replace(self.job, spec=DDPJobSpec.model_validate(fields), generation=self.job.generation + 1)
        self.version += 1

    def suspend(self, suspended: bool) -> None:
        if self.job.spec.suspend != suspended:
            self.edit(suspend=suspended)

    def _set(self, name: str, **fields: object) -> None:
        self.pods[name] = replace(self.pods[name], **fields)
        self._changed()

    def _changed(self) -> None:
        alive = (pod for pod in self.pods.values() if pod.phase not in ENDED and pod.node_rank is not None)
        self.live.append(tuple(sorted(f"{pod.attempt}/{pod.node_rank}" for pod in alive)))


@dataclass
class Operator:
    """One process of the operator. A new one knows of the Service and the claim only what it asks for."""

    cluster: Cluster
    decide: Decide = policy.plan
    service: ServiceView | None = None
    claim: bool = False
    problem: Problem | None = None
    children: set[tuple[str, str]] = field(default_factory=set)
    logs: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, Warned] = field(default_factory=dict)
    pods: tuple[PodView, ...] | None = None
    """An old picture of the pods, or None while the watch is up to date."""
    kill_after: int | None = None
    lose_after: int | None = None
    last_write: datetime | None = None
    wait: float | None = None

    def look(self) -> bool:
        """One pass; whether it came to rest."""
        for _ in range(LONGEST_CHAIN):
            job, version = self.cluster.job, self.cluster.version
            seen = self._observed()
            decided = self.decide(job, seen, self.cluster.now, DEFAULTS)
            self.wait = decided.requeue_after
            if decided.status_first and not self._write(decided, job, version):
                continue
            blocked, self.problem = self.problem is not None, None
            if decided.actions:
                refusals = [problem for action in decided.actions if (problem := self._do(action))]
                if refusals:
                    self.problem = refusals[0]
                    seen = self._observed()
                    version = self.cluster.version
                    decided = self.decide(self.cluster.job, seen, self.cluster.now, DEFAULTS)
                    self._write(decided, self.cluster.job, version)
                    return True
            elif not blocked:
                return decided.status_first or self._may_wait(job, decided) or self._write(decided, job, version)
        raise AssertionError(f"{LONGEST_CHAIN} plans in a row did not come to rest: {decided}")

    def _observed(self) -> Observed:
        known = self.cluster.report, self.problem
        fetchers = self.cluster.fetchers.values()
        return Observed(
            self._seen(),
            self.service,
            self.claim,
            *known,
            children=frozenset(self.children),
            logs=dict(self.logs),
            warnings=dict(self.warnings),
            initializer=max(fetchers, key=lambda pod: pod.number, default=None),
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
        self.last_write = self.cluster.now
        return written

    def _do(self, action: Action) -> Problem | None:
        self._before_call()
        problem = self.cluster.apply(action)
        self._after_call()
        match action:
            case CreateClaim():
                self.claim = True
            case CreateChild(manifest) if manifest["kind"] != "Pod":
                self.children.add((manifest["kind"], manifest["metadata"]["name"]))
            case CreateService() | PointService():
                self.service = self.cluster.service
            case ReadLog(uid=uid):
                self.logs[uid] = "the last line"
            case ReadWarnings(uid=uid):
                self.warnings[uid] = Warned(self.cluster.now, "FailedMount", "a volume")
            case CreatePod() | DeletePod() | AssignPod():
                self.pods = None  # the answer carries what is true now
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
        self.operator.kill_after = self.operator.lose_after = self.operator.pods = None
        until = self.cluster.now + timedelta(seconds=limit)
        for _ in range(10_000):
            before = len(self.cluster.history)
            self.look()
            if len(self.cluster.history) > before:
                continue
            waiting = [name for name, pod in self.cluster.pods.items() if pod.deleting and self.cluster.answers(name)]
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


__all__ = ["NOW", "UID", "Cluster", "Crash", "LostReply", "Operator", "World", "later"]
