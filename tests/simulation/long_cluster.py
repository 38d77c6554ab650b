"""The small cluster of the property tests, for jobs of many pods and many days.

It applies the operator's calls as `small_cluster` does. It keeps no history, and it notes what nodes have still to do:
start the pods that were created, read labels that were changed, stop pods that were deleted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/core"))

from builders import make_report
from small_cluster import POD_GRACE_SECONDS, Cluster

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.actions import Action, AssignPod
from ddpjob_operator.core.values.job import Problem
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination


@dataclass
class LongCluster(Cluster):
    """One job and its pods, one pod on a node."""

    created: list[str] = field(default_factory=list)
    """Pods that the operator has created, in order, and that have no start yet."""
    assigned: list[str] = field(default_factory=list)
    """Pods whose labels it has changed."""
    stopping: list[str] = field(default_factory=list)
    """Pods that it has deleted and that are still there."""

    def apply(self, action: Action) -> Problem | None:
        problem = self._apply(action)
        if isinstance(action, AssignPod):
            self.assigned.append(action.name)
        return problem

    def delete(self, name: str, grace: float | None, *, uid: str | None = None) -> None:
        before = self.pods.get(name)
        super().delete(name, grace, uid=uid)
        after = self.pods.get(name)
        if before is not None and after is not None and after.deleting and not before.deleting:
            self.stopping.append(name)

    def place(self, name: str, node: str) -> None:
        """The scheduler gives a pod a node."""
        since = self.now if node in self.silent else None
        self._set(name, scheduled=True, node_name=node, unacknowledged_since=since)

    def schedule(self, name: str) -> None:
        """Nothing: `place` does it."""

    def end(self, name: str, exit_code: int, reason: str = "", *, skew: float = 0.0, step: int | None = None) -> None:
        """The trainer of a pod that runs ends, after `step`; with a termination message if it gives a reason."""
        pod = self.pods[name]
        if not pod.running or not self.answers(name):
            return
        at = (self.now + timedelta(seconds=skew)).replace(microsecond=0)
        reported: dict[str, Any] = {"time": self.now.timestamp(), "attempt": self.heard[pod.uid]}
        message = make_report(reason, **reported, **({} if step is None else {"step": step})) if reason else ""
        ended = Termination(exit_code, message=message, finished_at=at)
        self._set(name, phase=PodPhase.FAILED, exited=True, termination=ended)

    def taint(self, node: str) -> None:
        """The time is over that pods tolerate a node that is not ready: they are deleted, and nobody confirms it."""
        for pod in self._on(node):
            if not pod.deleting:
                gone_by = self.now + timedelta(seconds=POD_GRACE_SECONDS)
                self._set(pod.name, deleting=True, gone_by=gone_by, disruption="DeletionByTaintManager")

    def replace_node(self, node: str) -> None:
        """A lost node is back, without the containers that it had."""
        self.come_back(node)
        for pod in self._on(node):
            if not pod.ended:
                ended = Termination(255, reason="Unknown", finished_at=self.now.replace(microsecond=0))
                self._set(pod.name, phase=PodPhase.FAILED, exited=True, ready=False, termination=ended)
            if pod.deleting:
                self.reap(pod.name)

    def busy_nodes(self) -> set[str]:
        """Nodes whose GPUs a pod holds."""
        return {pod.node_name for pod in self.pods.values() if pod.node_name is not None and not pod.ended}

    def at(self, moment: datetime) -> None:
        """Move the clock on."""
        self.now = max(self.now, moment)

    def _on(self, node: str) -> list[PodView]:
        return [pod for pod in self.pods.values() if pod.node_name == node]

    def _create(self, name: str, attempt: int, node_rank: int | None, metadata: dict[str, Any]) -> Problem | None:
        before = self.pods.get(name)
        problem = super()._create(name, attempt, node_rank, metadata)
        if before is None and name in self.pods:
            self.pods[name] = replace(self.pods[name], created=self.now)
            self.created.append(name)
        return problem

    def _record(self, status: DDPJobStatus) -> None:
        """Nothing: what is written stays in the job alone."""

    def _changed(self) -> None:
        self.events += 1
