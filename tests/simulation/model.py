"""One simulated run: failures at random, the shipped decision function `plan`, and a clock that jumps between events.

Phases, attempts, restarts, which pods are created, relabelled and deleted, backoff, lost nodes and the end of the job
come from `plan`, called by the operator of the property tests (`tests/unit/core/world.py`). Here is what happens around
it: processes and nodes fail, nodes start and stop pods, ranks train, save and resume. It is a pure function of its
arguments. Times are in seconds since the start of the job.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tests.simulation.long_cluster import LongCluster
from tests.simulation.parameters import DAY, SCOPES, Parameters, Setting
from tests.simulation.training import Stretch

from builders import NOW, UID, make_job  # isort: skip
from world import Operator  # isort: skip

from ddpjob_operator.api.status import Phase, SnapshotStatus
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.core.values.trainer_report import TrainerReport

LEAST_WAIT_SECONDS = 0.1
"""Between two looks of the operator that nothing but its own wait causes."""

OVER = (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a stretch of training began, and how far the one before had come. Steps."""

    at: float
    attempt: int
    resumed_from: int
    finished_before: int
    live: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """A failure that stopped training."""

    seconds: float
    """To the next step begun."""
    of_node: bool
    """Whether the node was lost, and not only a process."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to. Times in seconds."""

    seconds: float
    startup_seconds: float
    """Until the first step began."""
    goodput: float
    """Seconds of kept steps at full size, divided by `seconds`."""
    kept_steps: int
    trained_steps: int
    lost_steps: int
    """Finished, and made again from a snapshot."""
    failures: int
    dropped: int
    """Failures that found no running pod."""
    lost_nodes: int
    attempts: int
    restarts: int
    disruptions: int
    live_recoveries: int
    snapshots: int
    recoveries: tuple[Recovery, ...]
    phase: str
    reason: str
    """Why the job failed, if it did."""
    looks: int
    resumptions: tuple[Resumption, ...]


def simulate(
    setting: Setting, scope: str, seed: int, parameters: Parameters, *, spec: dict[str, Any] | None = None
) -> Result:
    """One job of `setting` for its days, with the restart policy SCOPES[scope]; `spec` has further fields."""
    fields = SCOPES[scope] | (spec or {})
    restart = SCOPES[scope]["restart"] | (spec or {}).get("restart", {})
    if setting.nodes_per_pod > 1:  # so many nodes in one would be excluded for what each does once a month
        restart = {"excludeNodeAfter": 0} | restart
    return _Run(setting, fields | {"restart": restart}, seed, parameters).result()


@dataclass
class _Run:
    setting: Setting
    spec: dict[str, Any]
    seed: int
    parameters: Parameters
    now: float = 0.0
    stretch: Stretch | None = None
    """Steps that are made now."""
    active: set[str] = field(default_factory=set)
    """Uids of the pods that take part in them."""
    dead: set[str] = field(default_factory=set)
    """Uids of pods whose ranks have ended or are out of reach, whatever the API server has of them."""
    up: dict[str, float] = field(default_factory=dict)
    """By uid, when the ranks of a pod are ready to meet the others."""
    awaited: set[str] = field(default_factory=set)
    """Names of pods that start or read their labels."""
    waiting_since: float | None = None
    """When ranks lost a peer, and began to wait for the next attempt in place."""
    snapshot: int = 0
    finished: int = 0
    """Steps of the newest state that any rank has or had."""
    failed_at: float | None = None
    """When training stopped."""
    failed_node: bool = False
    """Whether it was for the loss of a node."""

    def __post_init__(self) -> None:
        self.live = self.spec["restart"]["scope"] == "Live"
        self.in_place = self.spec["restart"]["scope"] != "Gang"
        self.horizon = self.setting.days * DAY
        self.every = max(1, round(self.parameters.snapshot_every_seconds / self.parameters.step_seconds))
        self.cluster = LongCluster(make_job(nodes=self.setting.pods, **self.spec))
        self.operator = Operator(self.cluster)
        self.nodes = [f"node-{index:04}" for index in range(self.setting.pods + self.parameters.free_nodes)]
        self.with_image: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # what fails, and when, is the same for every scope
        self._failures, self._starts = random.Random(f"failures {self.seed}"), random.Random(f"starts {self.seed}")
        self._token = 0
        self._meeting: set[str] = set()
        self._look_at: float | None = None
        self.attempt = 0
        """The attempt that `stretch` belongs to."""
        self.counts = dict.fromkeys(("failures", "dropped", "lost_nodes", "lost_steps", "trained", "saves", "looks"), 0)
        self.startup: float | None = None
        self.recoveries: list[Recovery] = []
        self.resumptions: list[Resumption] = []

    def result(self) -> Result:
        self._after(self._failures.expovariate(1.0 / self.setting.mtbf_seconds), self._fail)
        self._look()
        while self._step():
            pass
        self.now = self.horizon
        self._stop_training()
        status, n = self.cluster.job.status, self.counts
        if not self.live:  # whose pods are replaced within the attempt
            assert self.cluster.ends_lost == [], "an end of a pod that is on no record"
            assert self.cluster.begun_again == [], "two pods of one attempt and node rank"
        reason = status.last_failure.reason if status.last_failure and status.phase is Phase.FAILED else ""
        failed = next((c.reason for c in status.conditions if c.type == "Failed" and c.status == "True"), reason)
        return Result(
            seconds=self.horizon,
            startup_seconds=self.horizon if self.startup is None else self.startup,
            goodput=self.finished * self.parameters.step_seconds / self.horizon,
            kept_steps=self.finished,
            trained_steps=n["trained"],
            lost_steps=n["lost_steps"],
            failures=n["failures"],
            dropped=n["dropped"],
            lost_nodes=n["lost_nodes"],
            attempts=status.attempt + 1,
            restarts=status.restarts,
            disruptions=status.disruptions,
            live_recoveries=status.live_recoveries or 0,
            snapshots=n["saves"],
            recoveries=tuple(self.recoveries),
            phase=str(status.phase),
            reason=failed if status.phase is Phase.FAILED else "",
            looks=n["looks"],
            resumptions=tuple(self.resumptions),
        )

    # ---- the clock ---------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _step(self) -> bool:
        """The next event, or the operator's next look; False at the end."""
        if self.cluster.job.status.phase in OVER:
            return False
        event_at = self._events[0][0] if self._events else self.horizon
        look_at = self.horizon if self._look_at is None else self._look_at
        if min(event_at, look_at) >= self.horizon:
            return False
        self.now = min(event_at, look_at)
        self.cluster.at(NOW + timedelta(seconds=self.now))
        if event_at <= look_at:
            heapq.heappop(self._events)[2]()
        else:
            self._look()
        return True

    # ---- the operator ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """The operator looks at the job and does what `plan` says; then nodes begin with what it asked for."""
        attempt = self.cluster.job.status.attempt
        self._report()
        self.counts["looks"] += 1
        self.operator.look()
        wait = self.operator.wait
        self._look_at = None if wait is None else self.now + max(LEAST_WAIT_SECONDS, wait)
        if self.cluster.job.status.attempt != attempt:
            self.operator.creations.clear()
            self.operator.logs.clear()
            self._stop_training()  # of an attempt that is over, whatever its ranks do
        self._begin_calls()
        if self.stretch is None and not self.awaited:
            self._meet()

    def _report(self) -> None:
        """What node rank 0 answers to `/status`, if it can."""
        first = next((pod for pod in self.cluster.pods.values() if pod.node_rank == 0 and pod.running), None)
        if first is None or first.uid in self.dead:
            return
        attempt = self.cluster.heard[first.uid]
        waits = self.waiting_since is not None and self.in_place and attempt == self.attempt
        trained = self.stretch is not None and attempt == self.attempt
        if not (waits or trained):
            return
        if self.stretch is not None:
            self._note_snapshot()
        moment = NOW + timedelta(seconds=self.now)
        snapshot = SnapshotStatus(step=self.snapshot, time=moment, verified=True) if self.snapshot else None
        self.cluster.report = TrainerReport(
            uid=UID,
            attempt=attempt,
            time=moment.timestamp(),
            phase="waiting" if waits else "train",
            phase_seconds=self.now - self.waiting_since if waits and self.waiting_since is not None else None,
            step=self.finished if self.stretch is None else self.stretch.finished(self.now),
            snapshot=snapshot,
            resumed_from_step=self.resumptions[-1].resumed_from if self.resumptions else 0,
        )

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _begin_calls(self) -> None:
        """Nodes and kubelets begin with what the operator has asked for."""
        cluster, per_call = self.cluster, self.parameters.call_seconds * self.setting.nodes_per_pod
        if cluster.assigned:
            assigned, cluster.assigned = cluster.assigned, []
            self.awaited |= set(assigned)
            self._after(len(assigned) * per_call + self.parameters.label_seconds, lambda: self._hear(assigned))
        if cluster.stopping:
            stopping, cluster.stopping = cluster.stopping, []
            ended = [name for name in stopping if cluster.pods[name].ended]
            rest = [name for name in stopping if not cluster.pods[name].ended]
            if ended:
                self._after(0.0, lambda: self._reap(ended))
            if rest:
                grace = max((cluster.pods[name].gone_by or cluster.now) - cluster.now for name in rest)
                self._after(grace.total_seconds(), lambda: self._reap(rest))
        self._place(per_call)

    def _place(self, per_call: float = 0.0) -> None:
        """The scheduler gives pods that wait a node that is free, first one that has the image."""
        cluster, p = self.cluster, self.parameters
        cluster.created = [name for name in cluster.created if name in cluster.pods]
        if not cluster.created:
            return
        busy, excluded = cluster.busy_nodes(), set(cluster.job.status.excluded_nodes)
        free = [node for node in self.nodes if node not in busy | cluster.not_ready | excluded]
        free.sort(key=lambda node: (node not in self.with_image, node))
        names, cluster.created = cluster.created[: len(free)], cluster.created[len(free) :]
        for index, (name, node) in enumerate(zip(names, free, strict=False), start=1):
            cluster.place(name, node)
            uid = cluster.pods[name].uid
            pull = 0.0 if node in self.with_image else p.image_pull_seconds
            tails = (self._starts.expovariate(1.0) for _ in range(self.setting.nodes_per_pod))
            tail = p.pod_start_tail_seconds * max(tails)
            self.awaited.add(name)
            start = index * per_call + pull + p.pod_start_seconds + tail
            self._after(start, lambda name=name, uid=uid: self._run(name, uid))  # type: ignore[misc]

    def _run(self, name: str, uid: str) -> None:
        """The container of a pod starts, if it is still wanted and its node answers."""
        pod = self.cluster.pods.get(name)
        if pod is not None and pod.uid != uid:
            return  # another one of that name
        self.awaited.discard(name)
        if pod is None:
            return
        if self.cluster.answers(name) and not pod.deleting:
            self.with_image.add(str(pod.node_name))
            self.cluster.run(name)
            self.up[uid] = self.now + self.parameters.process_start_seconds
            if self.live and self.stretch is not None and pod.attempt == self.attempt:
                wait = self.parameters.process_start_seconds
                self._after(wait, lambda: self._join(name, uid))
                self._look()
                return
        if not self._starting() or self.cluster.pods[name].node_rank is None:
            self._look()

    def _starting(self) -> bool:
        """Whether a pod of the gang is still to run: the operator need not look at each one alone."""
        pods = self.cluster.pods
        return any(name in pods and pods[name].node_rank is not None for name in self.awaited)

    def _hear(self, names: Iterable[str]) -> None:
        """Pods read their labels, and their ranks begin again in place."""
        for name in names:
            self.awaited.discard(name)
            if name in self.cluster.pods and self.cluster.pods[name].uid not in self.dead:
                self.cluster.hear(name)
                self.up[self.cluster.pods[name].uid] = self.now + self.parameters.process_start_seconds
        self._meet()

    def _reap(self, names: Iterable[str]) -> None:
        """Kubelets are done with pods that were deleted; their nodes are free."""
        for name in names:
            if name in self.cluster.pods:
                self.cluster.reap(name)
        self._look()

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def _gang(self) -> dict[int, PodView]:
        """By node rank, the pods whose ranks know that they belong to the current attempt, and live."""
        attempt, cluster = self.cluster.job.status.attempt, self.cluster
        return {
            pod.node_rank: pod
            for pod in cluster.pods.values()
            if pod.node_rank is not None and pod.running and not pod.deleting and pod.attempt == attempt
            and cluster.heard[pod.uid] == attempt and pod.uid not in self.dead and pod.uid in self.up
        }  # fmt: skip

    def _meet(self) -> None:
        """If all ranks of the attempt are there, they meet, load the newest snapshot and train."""
        if self.stretch is not None:
            return
        gang = self._gang()
        if len(gang) < self.setting.pods or (self.waiting_since is not None and self._attempt() == self.attempt):
            return
        uids = {pod.uid for pod in gang.values()}
        if uids == self._meeting:
            return  # they are at it
        self._token += 1
        token, self._meeting = self._token, uids
        met = max(self.now, *(self.up[uid] for uid in uids)) + self.setting.rendezvous_seconds
        self._after(met + self.parameters.load_seconds - self.now, lambda: self._resume(token, uids))

    def _attempt(self) -> int:
        return self.cluster.job.status.attempt

    def _resume(self, token: int, uids: set[str]) -> None:
        """The first step after the newest snapshot begins, if nothing has happened meanwhile."""
        if token != self._token or self.stretch is not None or uids & self.dead:
            return
        if {pod.uid for pod in self._gang().values()} != uids:
            return
        self.attempt, self.active, self.waiting_since = self._attempt(), uids, None
        self.counts["lost_steps"] += self.finished - self.snapshot
        self.resumptions.append(Resumption(self.now, self.attempt, self.snapshot, self.finished))
        self.finished = self.snapshot
        if self.startup is None:
            self.startup = self.now
        if self.failed_at is not None:
            self.recoveries.append(Recovery(self.now - self.failed_at, self.failed_node))
            self.failed_at = None
        self._train(self.now, 0)

    def _train(self, begin: float, since: int) -> None:
        p, lost = self.parameters, self.setting.pods - len(self.active)
        share = 1.0 - lost / (self.setting.pods * self.setting.nodes_per_pod)
        self.stretch = Stretch(
            begin, self.finished, p.step_seconds / share, self.every, since, p.stall_seconds, p.save_seconds
        )

    def _note_snapshot(self) -> None:
        assert self.stretch is not None
        self.snapshot = max(self.snapshot, self.stretch.newest_snapshot(self.now) or 0)

    def _stop_training(self) -> int:
        """No further step is finished. The steps since the last snapshot was begun."""
        self._token += 1
        self._meeting = set()
        if self.stretch is None:
            return 0
        self._note_snapshot()
        finished, since = self.stretch.finished(self.now), self.stretch.since_snapshot(self.now)
        self.counts["trained"] += finished - self.stretch.first
        self.counts["saves"] += self.stretch.stalls(self.now)
        self.finished, self.stretch, self.active = finished, None, set()
        return since

    def _join(self, name: str, uid: str) -> None:
        """Live: a newcomer takes the state of the others, who wait for it."""
        pod = self.cluster.pods.get(name)
        gone = pod is None or pod.uid != uid or uid in self.dead or pod.deleting or not pod.running
        if gone or self.stretch is None or pod is None or pod.attempt != self.attempt:
            return
        self._regroup(self.active | {uid}, self.parameters.live_join_seconds)

    def _regroup(self, members: set[str], pause: float) -> None:
        """Live: the next step is made by `members`, after `pause`. The step and the save under way are dropped."""
        since = self._stop_training()
        self.active = members
        self.resumptions.append(Resumption(self.now, self.attempt, self.finished, self.finished, live=True))
        self._train(self.now + pause, since)

    # ---- failures ----------------------------------------------------------------------------------------------------

    def _fail(self) -> None:
        """A process or a node fails. What fails is drawn before it is looked for, for all scopes alike."""
        drawn = self._failures
        self._after(drawn.expovariate(1.0 / self.setting.mtbf_seconds), self._fail)
        rank, of_node = drawn.randrange(self.setting.pods), drawn.random() < self.parameters.lost_node_share
        attempt = self._attempt()
        alive = {
            pod.node_rank: pod
            for pod in self.cluster.pods.values()
            if pod.running and pod.attempt == attempt and pod.node_rank is not None and pod.uid not in self.dead
        }
        self.counts["failures"] += 1
        if not alive:
            self.counts["dropped"] += 1
            return
        pod = alive.get(rank) or alive[min(alive)]
        self._report()  # the operator asks every two seconds: the last answer is from now
        self.dead.add(pod.uid)
        p = self.parameters
        was_training = self.stretch is not None
        if self.live and was_training and len(self.active - {pod.uid}) > 0:
            if pod.uid in self.active:
                self._regroup(self.active - {pod.uid}, p.live_silent_seconds if of_node else p.live_process_seconds)
        else:
            self._stop_training()
            if self.failed_at is None and self.startup is not None:
                self.failed_at, self.failed_node = self.now, of_node
            if was_training:
                self.waiting_since = self.now
        if of_node:
            self._lose_node(pod, was_training)
        else:
            self._after(p.kubelet_seconds, lambda: self._end(pod, was_training))

    def _end(self, pod: PodView, was_training: bool) -> None:
        """The end of a process shows in the status of its pod."""
        if pod.name in self.cluster.pods and self.cluster.pods[pod.name].uid == pod.uid:
            self.cluster.end(pod.name, 137)
        if was_training:
            self._end_peers(pod)
        self._look()

    def _end_peers(self, pod: PodView) -> None:
        """Without restarts in place, the pods of ranks that lost a peer end, too."""
        if self.in_place or self._attempt() != pod.attempt:
            return
        for other in list(self.cluster.pods.values()):
            if other.attempt == pod.attempt and other.uid != pod.uid:
                self.cluster.end(other.name, 1, "PeerLost", step=self.finished)

    def _lose_node(self, pod: PodView, was_training: bool) -> None:
        node, p = str(pod.node_name), self.parameters
        self.counts["lost_nodes"] += 1
        self.cluster.die(node)
        if was_training and not self.live:
            self._after(p.peer_lost_seconds, lambda: self._notice(pod))
        self._after(p.monitor_grace_seconds, lambda: self._not_ready(node))
        tolerated = self.cluster.job.spec.restart.node_lost_seconds
        self._after(p.monitor_grace_seconds + tolerated, lambda: self._taint(node))
        self._after(p.node_back_seconds, lambda: self._bring_back(node))

    def _notice(self, pod: PodView) -> None:
        self._end_peers(pod)
        self._look()

    def _not_ready(self, node: str) -> None:
        self.cluster.fall_silent(node)
        self._look()

    def _taint(self, node: str) -> None:
        self.cluster.taint(node)
        self._look()

    def _bring_back(self, node: str) -> None:
        self.cluster.replace_node(node)
        self._look()
