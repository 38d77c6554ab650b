"""A small cluster in memory: the truth that an operator sees, late and in part, and acts on.

It applies calls as the API server does (names are unique, a deletion names a uid, a status write names a
resourceVersion), keeps a history, and does to pods what nodes, schedulers and people do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from builders import NOW, heard, make_report

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.gang.members import ended_before
from ddpjob_operator.core.manifests.placement import REQUIRED
from ddpjob_operator.core.stages.suspend import is_suspending
from ddpjob_operator.core.values.actions import (
    Action,
    AssignPod,
    CreateChild,
    CreatePod,
    CreatePVC,
    CreateService,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    PointService,
    ReleasePod,
    SyncPod,
)
from ddpjob_operator.core.values.job import Job, Problem
from ddpjob_operator.core.values.names import LABEL_GROUP
from ddpjob_operator.core.values.observed import InitializerView, PodPhase, PodView, ServiceView, Termination
from ddpjob_operator.core.values.trainer_report import TrainerReport

NODES = ("node-0", "node-1", "node-2")
ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)
PROGRESS = {"progress", "nodes", "snapshot", "goodput"}
POD_GRACE_SECONDS = 60


def avoided_nodes(spec: dict[str, Any]) -> frozenset[str]:
    """The nodes that a pod's `spec` keeps it away from, by name."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or ()
    fields = (field for term in terms for field in term.get("matchFields") or ())
    return frozenset(name for field in fields if field.get("operator") == "NotIn" for name in field["values"])


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
    hiccup: Callable[[], bool] = lambda: False
    """Whether the webhook that admits pods fails this time."""
    deleted: list[datetime] = field(default_factory=list)
    """When the job was deleted."""
    history: list[object] = field(default_factory=list)
    statuses: list[DDPJobStatus] = field(default_factory=list)
    events: int = 0
    """Changes of pods that the operator did not make."""
    events_before: list[int] = field(default_factory=list)
    """For each of `statuses`, how many there had been."""
    heard: dict[str, int] = field(default_factory=dict)
    """By uid, the attempt that a pod itself knows of: the kubelet takes a moment to tell it of its labels."""
    reaped: set[str] = field(default_factory=set)
    """Uids of pods that only a finalizer keeps."""
    silent: set[str] = field(default_factory=set)
    """Nodes that answer nothing."""
    not_ready: set[str] = field(default_factory=set)
    """Those of them of which the control plane has noticed it: the scheduler gives them no more pods."""
    avoids: dict[str, frozenset[str]] = field(default_factory=dict)
    """Nodes that a pod must not get, by its uid."""
    capacity: int | None = None
    """Pods that there is room for on all nodes together."""
    report: TrainerReport | None = None
    """What node rank 0 said last."""
    fetchers: dict[str, InitializerView] = field(default_factory=dict)
    """The pods that put data on the volume."""
    children: set[tuple[str, str]] = field(default_factory=set)
    pod_groups: set[tuple[str, str]] = field(default_factory=set)
    kubelet_lags: bool = False
    """Whether kubelets report a pod's exit before its phase, as they do since Kubernetes 1.27."""
    logs_lost: list[str] = field(default_factory=list)
    """Pods of the last attempt that had ended, and were deleted although cleanPodPolicy keeps them for their log."""
    ends_lost: list[str] = field(default_factory=list)
    """Pods of the current attempt that had ended, and vanished before that was on record."""
    before: tuple[Job, int] | None = None
    """The job and its version before its status was last written."""
    lost: int = 0
    """How often the job's status was lost."""
    replaced: set[str] = field(default_factory=set)
    """Uids of pods that are or were on record as lost while the others trained on: the ranks keep them out."""
    begun: set[tuple[int, int | None]] = field(default_factory=set)
    """Attempt and node rank of each pod whose container has begun, while it was created for them."""
    begun_again: list[str] = field(default_factory=list)
    """Pods that were created for an attempt and node rank that another pod had begun with."""
    live: list[tuple[str, ...]] = field(default_factory=list)
    """After each change, which pods were alive."""
    _uids: count[int] = field(default_factory=lambda: count(1))
    _steps: count[int] = field(default_factory=lambda: count(11))

    def write_status(self, status: DDPJobStatus, version: int) -> bool:
        if version != self.version:
            return False
        self.before = (self.job, self.version)
        # what comes back from an API server went through JSON
        status = DDPJobStatus.model_validate_json(status.model_dump_json(by_alias=True, exclude_none=True))
        self.job, self.version = replace(self.job, status=status), self.version + 1
        self._record(status)
        return True

    def _record(self, status: DDPJobStatus) -> None:
        self.replaced.update(status.internal.lost_pods)
        self.history.append(status)
        self.statuses.append(status)
        self.events_before.append(self.events)

    def apply(self, action: Action) -> Problem | None:
        self.history.append(action)
        events = self.events
        try:
            return self._apply(action)
        finally:
            self.events = events

    def _apply(self, action: Action) -> Problem | None:
        match action:
            case CreatePVC():
                self.claim = True
            case CreateService(manifest):
                attempt = int(manifest["spec"]["selector"]["training.ddpjob.io/attempt"])
                self.service = self.service or ServiceView("10.96.0.7", attempt)
            case PointService(attempt=attempt):
                assert self.service is not None, "a patch of a Service that is not there"
                self.service = replace(self.service, attempt=attempt)
            case CreatePod(name, attempt, node_rank, manifest):
                return self._create(name, attempt, node_rank, manifest)
            case AssignPod(name, uid, attempt, node_rank, nodes):
                if name in self.pods and self.pods[name].uid == uid:
                    self._set(name, attempt=attempt, node_rank=node_rank, nodes=nodes)
            case SyncPod(name, uid, sync):
                if name in self.pods and self.pods[name].uid == uid:
                    self._set(name, sync=sync)
            case DeletePod(name, uid) if name in self.fetchers:
                self.delete_fetcher(name, uid=uid)
            case DeletePod(name, uid, grace, release=release):
                self._note_lost_log(name)
                if release:
                    self.release(name, uid)  # two calls of one action
                self.delete(name, grace, uid=uid)
            case ReleasePod(name, uid):
                self.release(name, uid)
            case CreateChild(manifest) if manifest["kind"] == "Pod":
                metadata = manifest["metadata"]
                number = int(metadata["labels"]["training.ddpjob.io/attempt"])
                fetcher = InitializerView(metadata["name"], f"uid-{next(self._uids)}", PodPhase.PENDING, number)
                self.fetchers.setdefault(metadata["name"], fetcher)
            case CreateChild(manifest) if manifest["kind"] == "PodGroup":
                self.pod_groups.add((manifest["apiVersion"], manifest["metadata"]["name"]))
            case CreateChild(manifest):
                self.children.add((manifest["kind"], manifest["metadata"]["name"]))
            case DeletePodGroup(version, name):
                self.pod_groups.discard((version, name))
            case DeleteJob() if self.job.deleting:
                pass  # whose answer was lost
            case DeleteJob():
                # a finalizer of somebody's holds it, so that it can be seen whether it is left alone
                self.job, self.version = replace(self.job, deleting=True), self.version + 1
                self.deleted.append(self.now)
        return None

    def lacks(self) -> list[str]:
        """What the job is to have besides its pods, and has not."""
        groups = {pod.group for pod in self.pods.values() if pod.attempt == self.job.status.attempt}
        group = self.job.spec.scheduling.gang == "Volcano" and {name for _, name in self.pod_groups} != groups
        return [*["Service"] * (self.service is None), *["claim"] * (not self.claim), *["PodGroup"] * group]

    def fetch(self, exit_code: int) -> None:
        """The initializers that run come to their end."""
        for name, pod in self.fetchers.items():
            if pod.phase not in ENDED:
                phase = PodPhase.FAILED if exit_code else PodPhase.SUCCEEDED
                self.fetchers[name] = replace(pod, phase=phase, termination=Termination(exit_code))
                self.history.append((name, exit_code))

    def evict_fetchers(self) -> None:
        """The kubelet ends the initializers that run because its node ran short of something."""
        for name, pod in self.fetchers.items():
            if pod.phase not in ENDED:
                self.fetchers[name] = replace(pod, phase=PodPhase.FAILED, reason="Evicted")

    def delete_fetcher(self, name: str, *, uid: str | None = None) -> None:
        """At once if it has ended; else it is asked to, and its kubelet takes its time."""
        pod = self.fetchers[name]
        if uid is not None and pod.uid != uid:
            return
        if pod.phase in ENDED or pod.deleting:
            del self.fetchers[name]
        else:
            self.fetchers[name] = replace(pod, deleting=True, gone_by=self.now + timedelta(seconds=10))

    def _create(self, name: str, attempt: int, node_rank: int | None, manifest: dict[str, Any]) -> Problem | None:
        metadata = manifest["metadata"]
        if name in self.pods:
            return None
        if self.quota is not None and len(self.pods) >= self.quota:
            return Problem("QuotaExceeded", "exceeded quota: pods")
        if self.hiccup():
            return Problem("AdmissionFailed", "failed calling webhook: context deadline exceeded")
        if node_rank is not None and (attempt, node_rank) in self.begun and self.lost == 0:
            self.begun_again.append(name)
        uid = f"uid-{next(self._uids)}"
        nodes, held = metadata["labels"].get("training.ddpjob.io/nodes"), bool(metadata.get("finalizers"))
        self.pods[name] = PodView(
            name,
            uid,
            attempt,
            node_rank,
            PodPhase.PENDING,
            nodes=nodes and int(nodes),
            held=held,
            group=metadata["labels"].get(LABEL_GROUP, ""),
        )
        self.avoids[uid] = avoided_nodes(manifest["spec"])
        self.heard[uid] = attempt
        self._changed()
        return None

    def schedule(self, name: str, node: str | None = None) -> None:
        """The pod is given this node, or any that is ready, if there is one. It may have died a moment ago."""
        pod = self.pods[name]
        nodes = [node for node in NODES if node not in self.not_ready and node not in self.avoids[pod.uid]]
        if pod.phase is PodPhase.PENDING and not (pod.scheduled or pod.deleting) and nodes and self.has_room():
            load = Counter(other.node_name for other in self.pods.values())
            node = node or min(nodes, key=lambda node: (load[node], node))
            self._set(
                name, scheduled=True, node_name=node, unacknowledged_since=self.now if node in self.silent else None
            )

    def run(self, name: str) -> None:
        self.schedule(name)
        pod = self.pods[name]
        if pod.phase is PodPhase.PENDING and pod.scheduled and not pod.deleting and self.answers(name):
            self._set(name, phase=PodPhase.RUNNING, pod_ip="10.0.0.1", ready=True, ready_since=self.now)
            self.begun.add((pod.attempt, pod.node_rank))
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
            self.report = heard(attempt=self.heard[first.uid], step=step, snapshot=snapshot)

    def can_run(self, name: str) -> bool:
        pod = self.pods[name]
        out = self.not_ready | self.avoids[pod.uid]
        placeable = self.answers(name) if pod.scheduled else not out.issuperset(NODES) and self.has_room()
        return pod.phase is PodPhase.PENDING and not pod.deleting and placeable

    def answers(self, name: str) -> bool:
        """Whether a pod's node is there to do and say anything about it."""
        return self.pods[name].node_name not in self.silent

    def die(self, node: str) -> None:
        """A node dies, or only its kubelet, and nobody has noticed."""
        self.silent.add(node)

    def fall_silent(self, node: str) -> None:
        """A node has died, or dies. The control plane notices, and marks what ran there not ready."""
        self.silent.add(node)
        self.not_ready.add(node)
        for name, pod in self.pods.items():
            if pod.node_name == node and pod.phase is PodPhase.RUNNING:
                self._set(name, ready=False, ready_since=None, not_ready_since=pod.not_ready_since or self.now)

    def evict_by_taint(self) -> None:
        """The time is over that pods tolerate a node that is not ready: they are deleted, and nobody confirms it."""
        for name, pod in self.pods.items():
            if pod.node_name in self.not_ready and not pod.deleting:
                gone_by = self.now + timedelta(seconds=POD_GRACE_SECONDS)
                self._set(name, deleting=True, gone_by=gone_by, disruption="DeletionByTaintManager")

    def come_back(self, node: str) -> None:
        """Its kubelet tells again what became of its pods."""
        self.silent.discard(node)
        self.not_ready.discard(node)
        for name, pod in self.pods.items():
            if pod.node_name == node:
                running = pod.phase is PodPhase.RUNNING
                since = self.now if running else None
                self._set(name, not_ready_since=None, unacknowledged_since=None, ready=running, ready_since=since)

    def end(self, name: str, exit_code: int, reason: str = "", *, skew: float = 0.0) -> None:
        """The trainer of a pod that runs comes to its end."""
        if not self.pods[name].running or not self.answers(name):
            return
        reported = {"time": self.now.timestamp(), "step": 10, "attempt": self.heard[self.pods[name].uid]}
        message = make_report(reason, **reported) if reason else ""
        at = (self.now + timedelta(seconds=skew)).replace(microsecond=0)
        phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
        phase = PodPhase.RUNNING if self.kubelet_lags else phase
        self._set(name, phase=phase, exited=True, termination=Termination(exit_code, message=message, finished_at=at))

    def evict(self, name: str) -> None:
        """The kubelet ends a pod because its node ran short of something."""
        if self.pods[name].phase is PodPhase.RUNNING:
            self._set(name, phase=PodPhase.FAILED, reason="Evicted", message="The node was low on resource: memory.")

    def delete(self, name: str, grace: float | None, *, uid: str | None = None) -> None:
        pod, grace = self.pods.get(name), POD_GRACE_SECONDS if grace is None else grace
        if pod is None or (uid is not None and pod.uid != uid):
            return
        pending = pod.phase is PodPhase.PENDING
        if (at_once := grace == 0 or (pending and self.answers(name))) and not pod.held:
            self._vanish(name)
        elif at_once:
            self._set(name, deleting=True, gone_by=self.now)
            self.reaped.add(pod.uid)
        elif not pod.deleting:
            self._set(name, deleting=True, gone_by=self.now + timedelta(seconds=0 if pending else grace))

    def reap(self, name: str) -> None:
        """The kubelet is done with a pod that was deleted, whose trainer it stops where it still runs."""
        pod = self.pods[name]
        if not pod.deleting or not self.answers(name):
            return
        if pod.running:
            at, phase = self.now.replace(microsecond=0), PodPhase.FAILED
            self._set(name, phase=phase, exited=True, termination=Termination(143, finished_at=at))
        self.reaped.add(pod.uid)
        self._collect(name)

    def is_stopping(self, name: str) -> bool:
        """Whether the kubelet has still to do with a pod that was deleted."""
        pod = self.pods[name]
        return pod.deleting and self.answers(name) and pod.uid not in self.reaped

    def release(self, name: str, uid: str) -> None:
        """Remove the operator's finalizer."""
        if name in self.pods and self.pods[name].uid == uid and self.pods[name].held:
            self._set(name, held=False)
            self._collect(name)

    def _collect(self, name: str) -> None:
        if self.pods[name].uid in self.reaped and not self.pods[name].held:
            self._vanish(name)

    def _vanish(self, name: str) -> None:
        pod, status = self.pods.pop(name), self.job.status
        in_gang = status.phase in (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING) and not is_suspending(status)
        counts = in_gang and pod.attempt == status.attempt and pod.node_rank in range(status.nodes.total)
        recorded = pod.node_rank in status.internal.succeeded_nodes or ended_before(pod, status)
        recorded = recorded or pod.uid in status.internal.lost_pods
        if counts and pod.termination is not None and not recorded:
            self.ends_lost.append(name)
        self._changed()

    def _note_lost_log(self, name: str) -> None:
        status, pod = self.job.status, self.pods.get(name)
        kept = self.job.spec.clean_pod_policy == "Running" and status.is_final
        if kept and pod is not None and pod.ended and pod.attempt == status.attempt and pod.node_rank is not None:
            self.logs_lost.append(name)

    def phases_follow(self) -> None:
        """The phases of pods that have exited are reported too."""
        for name, pod in list(self.pods.items()):
            if pod.exited and not pod.phase.final and self.answers(name) and pod.termination is not None:
                self._set(name, phase=PodPhase.FAILED if pod.termination.exit_code else PodPhase.SUCCEEDED)

    def lose_status(self) -> None:
        """Somebody restored the job from a backup that has no status."""
        self.job, self.version = replace(self.job, status=DDPJobStatus()), self.version + 1
        self.lost += 1
        self._record(DDPJobStatus())

    def label(self, name: str, attempt: int, node_rank: int | None) -> None:
        """Somebody changes a pod's labels."""
        self._set(name, attempt=attempt, node_rank=node_rank)

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
        self.events += 1
        pods = (pod for pod in self.pods.values() if not pod.ended and pod.uid not in self.replaced)
        alive = (pod for pod in pods if pod.node_rank is not None)
        self.live.append(tuple(sorted(f"{pod.attempt}/{pod.node_rank}" for pod in alive)))
