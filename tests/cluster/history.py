"""All that happened to a namespace's jobs and pods, as the API server announced it, and rules that hold throughout.

A look at the end misses what was wrong only for a moment: two pods of one node rank, a restart counted twice and put
right again. So a watch records every version of every object, a test waits on that record, and the rules are checked
over all of it. In the end etcd's own history shows that the watch has missed none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from tests.cluster.kube import Kubectl, Object, describe
from tests.cluster.watch import Watch, WatchExpired
from tests.support.etcd import Etcd
from tests.support.waiting import CLUSTER_SECONDS, NeverHappened

T = TypeVar("T")

JOB = "training.ddpjob.io/job"
UID = "training.ddpjob.io/uid"
ATTEMPT = "training.ddpjob.io/attempt"
NODE_RANK = "training.ddpjob.io/node-rank"

PATHS = {
    "ddpjobs": "/apis/training.ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs",
    "pods": "/api/v1/namespaces/{namespace}/pods",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One watch event: `type` is ADDED, MODIFIED or DELETED, `time` is when it got here (seconds since the epoch)."""

    time: float
    kind: str
    type: str
    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def status(self) -> dict[str, Any]:
        return self.object.get("status") or {}


@dataclass
class History:
    """Records from `with` to its end. `wait` returns as soon as the record fulfils a condition."""

    kubectl: Kubectl
    changes: list[Change] = field(default_factory=list)
    relist: bool = False
    """Whether to go on where changes were missed: the API server itself dies in this test."""
    _news: threading.Condition = field(default_factory=threading.Condition)
    _watches: dict[str, Watch] = field(default_factory=dict)
    _readers: list[threading.Thread] = field(default_factory=list)
    _ended: str = ""

    def __enter__(self) -> History:
        for kind, path in PATHS.items():
            watch = Watch(self.kubectl, path.format(namespace=self.kubectl.namespace), relist=self.relist)
            reader = threading.Thread(target=self._read, args=(kind, watch), name=f"watch of {kind}", daemon=True)
            reader.start()
            self._watches[kind] = watch
            self._readers.append(reader)
        for watch in self._watches.values():
            assert watch.listed.wait(CLUSTER_SECONDS), f"nothing can be listed: {watch.problem}"
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches.values():
            watch.stop()
        for reader in self._readers:
            reader.join()

    def _read(self, kind: str, watch: Watch) -> None:
        try:
            for type_, obj in watch:
                with self._news:
                    self.changes.append(Change(time.time(), kind, type_, obj))
                    self._news.notify_all()
        except Exception as missed:
            with self._news:
                self._ended = f"changes of {kind} are not on record: {missed!r}"
                self._news.notify_all()
            if not isinstance(missed, WatchExpired):
                raise

    def of(self, kind: str, name: str | None = None) -> list[Change]:
        """All changes of one kind, or of one object, oldest first."""
        return [change for change in list(self.changes) if change.kind == kind and name in (None, change.name)]

    def stored(self) -> list[Change]:
        """All changes up to the last on record as etcd has them, oldest first: those that the record lacks, too.

        The record itself where etcd cannot be read: in a cluster that was there already.
        """
        if (etcd := Etcd.beside(self.kubectl.kubeconfig)) is None:
            return list(self.changes)
        found = []
        for kind in PATHS:
            if recorded := self.of(kind):
                until = max(int(change.object["metadata"]["resourceVersion"]) for change in recorded)
                found += etcd.changes(kind, self.kubectl.namespace, until)
        return [Change(0.0, one.kind, one.type, one.object) for one in sorted(found, key=lambda one: one.revision)]

    def differences(self) -> list[str]:
        """Changes that only the record has, or only etcd; none where etcd cannot be read."""
        etcd = Etcd.beside(self.kubectl.kubeconfig)
        record = [(change.kind, change.object) for change in list(self.changes)]
        return etcd.differences(self.kubectl.namespace, record) if etcd else []

    def latest(self, kind: str, name: str) -> Object | None:
        """An object as it is now; None where it is not, or not any more."""
        changes = self.of(kind, name)
        return changes[-1].object if changes and changes[-1].type != "DELETED" else None

    def present(self, kind: str) -> list[Object]:
        """All objects of a kind that are there now."""
        return [
            obj for name in dict.fromkeys(change.name for change in self.of(kind)) if (obj := self.latest(kind, name))
        ]

    def wait(self, condition: Callable[[], T | None], what: str, seconds: float = CLUSTER_SECONDS) -> T:
        """What `condition` returns as soon as that is true; it is asked again at each change.

        Raises NeverHappened, with all there is to see in the namespace.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while not (found := condition()):
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    problems = [
                        f"watch of {kind}: {watch.problem}" for kind, watch in self._watches.items() if watch.problem
                    ]
                    raise NeverHappened(
                        "\n".join(
                            [f"{self._ended or f'not within {seconds:g} s'}: {what}", *problems, describe(self.kubectl)]
                        )
                    )
                self._news.wait(left)
        return found


WAITS = "none"
"""The node rank of a pod that has none, and waits for one."""


def nodes_with_two_pods(changes: list[Change]) -> list[str]:
    """Where a node of a gang (job uid, attempt, node rank) was ever given a second pod; one that waits is no node."""
    pods: dict[tuple[str, ...], set[str]] = {}
    for change in changes:
        labels = change.object["metadata"].get("labels") or {}
        if change.kind == "pods" and UID in labels and labels.get(NODE_RANK, WAITS) != WAITS:
            node = (labels[UID], labels[ATTEMPT], labels[NODE_RANK])
            pods.setdefault(node, set()).add(change.object["metadata"]["uid"])
    return [f"attempt {node[1]}, node rank {node[2]}: {len(uids)} pods" for node, uids in pods.items() if len(uids) > 1]


def untrue_steps(statuses: list[dict[str, Any]]) -> list[str]:
    """Steps between statuses that must never be: a restart counted twice or taken back, a final phase left.

    A cause that becomes known late, such as a lost node, makes a disruption of the restart that was counted, and
    is then the last failure.
    """
    wrong = []
    for before, after in pairwise(statuses):
        attempts, restarts, live, disruptions = (
            (after.get(key) or 0) - (before.get(key) or 0)
            for key in ("attempt", "restarts", "liveRecoveries", "disruptions")
        )
        counted = attempts in (0, 1) and live in (0, 1) and restarts - live in (0, attempts)
        has_late_cause = _last_reason(before) != _last_reason(after)
        if not counted and not (has_late_cause and (attempts, restarts, disruptions) == (0, -1, 1)):
            wrong.append(f"attempt and restarts went from {_counts(before)} to {_counts(after)}")
        if before.get("phase") in ("Succeeded", "Failed") and after.get("phase") != before["phase"]:
            wrong.append(f"phase went from {before['phase']} to {after.get('phase')}")
    return wrong


def _last_reason(status: dict[str, Any]) -> str | None:
    return (status.get("lastFailure") or {}).get("reason")


def _counts(status: dict[str, Any]) -> tuple[int, int]:
    return status.get("attempt", 0), status.get("restarts", 0)
