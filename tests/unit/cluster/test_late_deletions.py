"""A kubelet that lives and a clock that is wrong: neither makes a lost node of a pod that takes its time to end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Owner
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values.actions import Action, CreatePod, CreateService, DeletePod, PointService
from ddpjob_operator.core.values.job import Defaults, Job

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
OWNER = Owner("ns", "job-1")
DEFAULTS = Defaults(trainer_image="registry.example/trainer:1")
LONGEST = 600
"""Seconds within which the job is over."""


@dataclass
class Cluster:
    """One job, its pods as the API server has them, and an operator whose clock may be ahead of the cluster's."""

    skew: float = 0.0
    takes: float = 1.0
    """Seconds after the end of its grace until a pod is gone."""
    spec: DDPJobSpec = field(
        default_factory=lambda: DDPJobSpec.model_validate({"nodes": 2, "restart": {"maxRestarts": 5}})
    )
    now: datetime = NOON
    status: DDPJobStatus = field(default_factory=DDPJobStatus)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    avoided: set[str] = field(default_factory=set)
    """All nodes that were ever avoided."""
    _versions: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.cache = Cache(clock=self.clock)
        self.service(0)

    def clock(self) -> datetime:
        return self.now + timedelta(seconds=self.skew)

    def service(self, attempt: int) -> None:
        selector = {"training.ddpjob.io/attempt": str(attempt)}
        spec = {"clusterIP": "10.0.0.9", "ports": [{"port": 29500}], "selector": selector}
        metadata = {"name": "digits", "namespace": "ns", "uid": "service", "resourceVersion": str(next(self._versions))}
        self.cache.put_service(OWNER, {"metadata": metadata, "spec": spec})

    def change(self, name: str, metadata: dict[str, Any] | None = None, **status: Any) -> None:
        pod = self.pods[name]
        version = {"resourceVersion": str(next(self._versions))}
        changed = pod | {
            "metadata": pod["metadata"] | (metadata or {}) | version,
            "status": pod["status"] | status,
        }
        self.pods[name] = changed
        self.cache.put_pod(changed)

    def create(self, name: str, attempt: int, rank: int) -> None:
        """The scheduler binds it at once; its kubelet has not seen it yet."""
        labels = {"training.ddpjob.io/attempt": str(attempt), "training.ddpjob.io/node-rank": str(rank)}
        owner = {"kind": "DDPJob", "name": "digits", "uid": OWNER.uid, "controller": True}
        metadata = {"name": name, "namespace": "ns", "uid": name, "labels": labels, "ownerReferences": [owner]}
        self.pods[name] = {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}}
        self.change(name)
        self.pods[name]["spec"]["nodeName"] = f"node-{rank}"
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time(self.now)}
        self.change(name, conditions=[bound])

    def run(self) -> None:
        """The kubelets start what was bound to them."""
        for name, pod in self.pods.items():
            if pod["status"]["phase"] == "Pending":
                running = [{"name": "trainer", "state": {"running": {}}}]
                self.change(name, phase="Running", startTime=time(self.now), containerStatuses=running)

    def lose_peer(self, name: str) -> None:
        """The ranks of a pod end, since they have lost one of another pod, which runs on."""
        report = {"version": 1, "outcome": "Failed", "reason": "PeerLost", "message": "connection reset"}
        ended = {"exitCode": 1, "finishedAt": time(self.now), "message": json.dumps(report)}
        self.change(name, phase="Failed", containerStatuses=[{"name": "trainer", "state": {"terminated": ended}}])

    def delete(self, name: str, grace: int) -> None:
        if "deletionTimestamp" in self.pods[name]["metadata"]:
            return
        gone_by = time(self.now + timedelta(seconds=grace))
        self.change(name, {"deletionTimestamp": gone_by, "deletionGracePeriodSeconds": grace})

    def reap(self) -> None:
        """The kubelets are done with what was deleted long enough ago."""
        for name, pod in list(self.pods.items()):
            gone_by = pod["metadata"].get("deletionTimestamp")
            if gone_by and (self.now - datetime.fromisoformat(gone_by)).total_seconds() >= self.takes:
                del self.pods[name]
                self.cache.forget_pod(pod["metadata"]["uid"])

    def look(self) -> None:
        for _ in range(8):
            job = Job("digits", "ns", OWNER.uid, 1, NOON, self.spec, self.status)
            observed = replace(self.cache.observed(OWNER), pvc_exists=True, logs=dict.fromkeys(self.pods, ""))
            decided = plan(job, observed, self.clock(), DEFAULTS)
            self.status = decided.status
            self.avoided.update(self.status.internal.avoided_nodes)
            for action in decided.actions:
                self.do(action)
            if not decided.actions:
                return

    def do(self, action: Action) -> None:
        match action:
            case CreateService():
                self.service(self.status.attempt)
            case PointService(attempt=attempt):
                self.service(attempt)
            case CreatePod(name, attempt, rank) if rank is not None:
                self.create(name, attempt, rank)
            case DeletePod(name, _, grace) if name in self.pods:
                self.delete(name, 30 if grace is None else grace)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += timedelta(seconds=1)
            self.reap()
            self.run()
            self.look()


def time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


@pytest.mark.parametrize("takes", [1, 20], ids=["ends at once", "ends 20 s late"])
@pytest.mark.parametrize("skew", [-60, 0, 13, 25, 60])
def test_every_restart_counts_where_no_node_is_lost(skew: float, takes: float) -> None:
    cluster, restarts = Cluster(skew, takes), [0]
    cluster.look()
    while cluster.status.phase is not Phase.FAILED and (cluster.now - NOON).total_seconds() < LONGEST:
        name = f"digits-{cluster.status.attempt}-0"
        if name in cluster.pods and cluster.pods[name]["status"]["phase"] == "Running":
            cluster.lose_peer(name)
        cluster.pass_time(1)
        if cluster.status.restarts != restarts[-1]:
            restarts.append(cluster.status.restarts)
    status = cluster.status
    assert restarts == [0, 1, 2, 3, 4, 5]
    assert (status.phase, status.disruptions) == (Phase.FAILED, 0)
    assert "BackoffLimitExceeded" in {condition.reason for condition in status.conditions}
    assert (status.node_failures, cluster.avoided) == ({}, set())
    assert status.last_failure is not None
    assert status.last_failure.reason == "PeerLost"
