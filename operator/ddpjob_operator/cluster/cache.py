"""What is known of the cluster, without asking it: DDPJobs, their pods and services, as last seen.

Three sources write here, in any order: kopf's watch events, the answers to our own writes (so that a pass sees what
the pass before it did), and the periodic lists. Each object carries its resourceVersion and an older one never
replaces a newer one; the uid of an object that is gone is remembered until two lists later, so that a late event or a
stale list cannot bring it back.

Versions are compared as numbers, which Kubernetes promises for its own resources and custom resources (KEP-5504) and
etcd has always given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ddpjob_operator.cluster.children import CLAIM, SERVICE, Child, Children, Kind
from ddpjob_operator.cluster.owners import Key, Owner, controller_of, key_of_pod, owner_of
from ddpjob_operator.core.gang.creation import counted
from ddpjob_operator.core.values import names
from ddpjob_operator.core.values.actions import ReleasePod
from ddpjob_operator.core.values.observed import Creations, InitializerView, Observed, PodView, PodWarning, ServiceView
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.wire.jobs import kept
from ddpjob_operator.wire.pods import deletion_began, is_held, parse_initializer, parse_pod

Json = Mapping[str, Any]


class Listed(NamedTuple):
    """The uids of all objects of one kind, and the resourceVersion at which these were all."""

    uids: Set[str]
    version: int


@dataclass(slots=True)
class _Pod:
    view: PodView | InitializerView
    version: int
    owner: Owner
    late: timedelta = timedelta()
    """How much later than the API server says its grace ends by this process's clock."""


@dataclass(slots=True)
class _Siblings:
    """Uids of the pods of one job."""

    key: Key
    uids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Unwatched:
    """What is known of one job's children besides its pods, mostly from answers. Lost with the process, and asked for
    again by the next plan.

    `cluster.apply` writes it with the answers to its calls, the controller with the trainer's reports, `child_watch`
    what exists; all through methods of the cache. `Cache.observed` reads it.
    """

    service: ServiceView | None = None
    report: TrainerReport | None = None
    children: Children = field(default_factory=Children)
    logs: dict[str, str] = field(default_factory=dict)
    """Tails of logs by the uid of their pod, for as long as that is there."""
    warnings: dict[str, PodWarning] = field(default_factory=dict)
    """What was found in events, likewise."""
    creations: dict[str, Creations] = field(default_factory=dict)
    """Of the pods of one attempt."""
    creations_attempt: int = 0


@dataclass(slots=True)
class Cache:
    """The operator's picture of the cluster. Only the event loop's thread touches it."""

    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    """The one that `plan` goes by."""
    _jobs: dict[Key, Json] = field(default_factory=dict)
    _labelled: dict[Key, Key] = field(default_factory=dict)
    """By the value of the job label, keys of the jobs whose name is no label."""
    _dropped: dict[Key, Json] = field(default_factory=dict)
    """Until the next pass over the key."""
    _pods: dict[str, _Pod] = field(default_factory=dict)
    _pods_of: dict[Owner, _Siblings] = field(default_factory=dict)
    _owners: dict[Key, set[Owner]] = field(default_factory=dict)
    """For each key, the jobs of that name that have pods: one that is deleted may have some for a while."""
    _lost: dict[Key, dict[str, str]] = field(default_factory=dict)
    """Names by uid of pods with our finalizer that belong to no job any more, or have left the watch alive."""
    _unwatched: dict[Owner, _Unwatched] = field(default_factory=dict)
    _listed: set[str | None] = field(default_factory=set)
    doubts: int = 0
    """How often `distrust` was called."""
    _confirmed: set[str] = field(default_factory=set)
    """Uids of jobs that this process has read or written since."""
    _gone: dict[str, int] = field(default_factory=dict)
    _last_list: int = 0

    def job(self, key: Key) -> Json | None:
        """The DDPJob object as last seen, as far as it is kept. It is shared: never change it."""
        return self._jobs.get(key)

    def is_listed(self, namespace: str) -> bool:
        """Whether all pods of a namespace are known; before, one that is not would be taken for one that is lost."""
        return None in self._listed or namespace in self._listed

    def distrust(self) -> None:
        """Somebody else may have acted: nothing is decided in a namespace until it has been listed anew, and what no
        list has of a job, its Service and the last report of its trainer, is asked for again."""
        self._listed.clear()
        self._confirmed.clear()
        self.doubts += 1
        for known in self._unwatched.values():
            known.service = known.report = None

    def observed(self, owner: Owner) -> Observed:
        """All that is known of a job's children at this moment, in a stable order."""
        views = [self._pods[uid].view for uid in self._uids_of(owner)]
        pods = [view for view in views if isinstance(view, PodView)]
        initializers = [view for view in views if isinstance(view, InitializerView)]
        known = self._unwatched.get(owner) or _Unwatched()
        return Observed(
            pods=tuple(sorted(pods, key=_place)),
            service=known.service,
            service_exists=known.children.has(SERVICE),
            address=known.children.address,
            pvc_exists=known.children.has(CLAIM),
            report=known.report,
            children=known.children.names,
            pod_groups=known.children.pod_groups,
            logs=dict(known.logs),
            warnings=dict(known.warnings),
            initializer=max(initializers, key=lambda view: view.number, default=None),
            creations=dict(known.creations),
            status_confirmed=owner.uid in self._confirmed,
        )

    def _uids_of(self, owner: Owner) -> Iterable[str]:
        siblings = self._pods_of.get(owner)
        return siblings.uids if siblings else ()

    def version_of(self, uid: str) -> int | None:
        """The resourceVersion of a pod as last seen."""
        known = self._pods.get(uid)
        return known.version if known else None

    def service_version(self, owner: Owner, name: str) -> int | None:
        """The resourceVersion of a job's Service as last seen."""
        return self._of(owner).children.versions.get(Child(SERVICE, name))

    def unclaimed(self, key: Key, uid: str | None) -> tuple[ReleasePod, ...]:
        """Pods with our finalizer that no plan is made for, since they do not belong to the job `uid`, and which are
        being deleted or have lost their job's reference or our label."""
        found = dict(self._lost.get(key, {}))
        for owner in self._owners.get(key, ()):
            for view in (self._pods[pod].view for pod in self._uids_of(owner) if owner.uid != uid):
                if isinstance(view, PodView) and view.held and view.deleting:
                    found[view.uid] = view.name
        return tuple(ReleasePod(name, pod) for pod, name in found.items())

    def put_job(self, obj: Json) -> bool:
        """Take in a DDPJob as seen; whether that was news."""
        meta = obj["metadata"]
        key = Key(meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if meta["uid"] in self._gone or (known is not None and _version(known) >= _version(obj)):
            return False
        if known is not None and known["metadata"]["uid"] != meta["uid"]:
            self._unwatched.pop(Owner(key.namespace, known["metadata"]["uid"]), None)
        self._jobs[key] = kept(obj)
        if (label := _labelled(key)) != key:
            self._labelled[label] = key
        return True

    def confirm_job(self, obj: Json, doubts: int) -> bool:
        """Take in a DDPJob as the API server has answered, asked when there were so many `doubts`; whether that was
        news. From then on what is known of it is never older than what this process has written."""
        if doubts == self.doubts:
            self._confirmed.add(obj["metadata"]["uid"])
        return self.put_job(obj)

    def drop_job(self, obj: Json, version: int | None = None) -> bool:
        """Take in that a DDPJob is gone (at `version`, if `obj` is from before); whether that was news. A newer job of
        the same name stays."""
        meta = obj["metadata"]
        self._gone.setdefault(meta["uid"], _version(obj) if version is None else version)
        self._confirmed.discard(meta["uid"])
        self._unwatched.pop(Owner(meta["namespace"], meta["uid"]), None)
        known = self._jobs.get(Key(meta["namespace"], meta["name"]))
        if known is None or known["metadata"]["uid"] != meta["uid"]:
            return False
        key = Key(meta["namespace"], meta["name"])
        gone = self._jobs.pop(key)
        if self._labelled.get(label := _labelled(key)) == key:
            del self._labelled[label]
        if self.is_listed(key.namespace):
            self._dropped[key] = gone
        return True

    def take_dropped(self, key: Key) -> Json | None:
        """The last DDPJob of this name that has gone since its namespace was listed, as it was last seen; once. Of
        what was gone by then another process may know."""
        return self._dropped.pop(key, None)

    def put_pod(self, obj: Json) -> bool:
        """Take in a pod as seen; whether that was news."""
        meta = obj["metadata"]
        uid, version = meta["uid"], _version(obj)
        if not is_held(obj):
            self._released(uid)
        known = self._pods.get(uid)
        if uid in self._gone or (known is not None and known.version >= version):
            return False
        view, owner = parse_initializer(obj) or parse_pod(obj), owner_of(obj)
        if owner is None:
            news = self.drop_pod(obj)
            if is_held(obj):
                self._lost.setdefault(self.key_of(obj), {})[uid] = meta["name"]
            return news or is_held(obj)
        if known is not None and known.owner != owner:
            self._part(uid, known.owner)
        late = self._late(obj, view, known)
        if view.gone_by is not None:
            view = replace(view, gone_by=view.gone_by + late)
        if view.unacknowledged_since is not None and known is not None:
            view = replace(view, unacknowledged_since=known.view.unacknowledged_since or self.clock())
        if known is not None and isinstance(view, PodView) and isinstance(known.view, PodView):
            view = view.seen_after(known.view)
            if view.termination is not None:
                begins = known.view.termination is None
                view = replace(view, end_seen=self.clock() if begins else known.view.end_seen)
        self._pods[uid] = _Pod(view, version, owner, late)
        if owner not in self._pods_of:
            key = key_of_pod(obj)
            self._pods_of[owner] = _Siblings(key)
            self._owners.setdefault(key, set()).add(owner)
        self._pods_of[owner].uids.add(uid)
        return known is None or known.view != view

    def _late(self, obj: Json, view: PodView | InitializerView, known: _Pod | None) -> timedelta:
        """How much later its grace ends by our clock, which may be another than the API server's. It begins when the
        deletion is first seen; of one that began before this process did, it may be over."""
        began = deletion_began(obj)
        if began is None or view.gone_by is None:
            return timedelta()
        if known is None:
            return max(self.clock() - view.gone_by, timedelta())
        return known.late if known.view.deleting else self.clock() - began

    def drop_pod(self, obj: Json) -> bool:
        """Take in that a pod is gone; whether that was news."""
        news = self.forget_pod(obj["metadata"]["uid"], _version(obj))
        if not is_held(obj) or "deletionTimestamp" in obj["metadata"]:
            return news
        # it has only lost our label
        self._lost.setdefault(self.key_of(obj), {})[obj["metadata"]["uid"]] = obj["metadata"]["name"]
        return True

    def forget_pod(self, uid: str, version: int | None = None) -> bool:
        """Take in that the pod of that uid does not exist; whether that was news."""
        self._gone.setdefault(uid, self._last_list if version is None else version)
        self._released(uid)
        known = self._pods.pop(uid, None)
        if known is None:
            return False
        if known.owner in self._unwatched:
            self._unwatched[known.owner].logs.pop(uid, None)
            self._unwatched[known.owner].warnings.pop(uid, None)
        self._part(uid, known.owner)
        return True

    def _released(self, uid: str) -> None:
        """A finalizer that is gone does not come back."""
        for key in [key for key, pods in self._lost.items() if uid in pods]:
            del self._lost[key][uid]
            if not self._lost[key]:
                del self._lost[key]

    def _part(self, uid: str, owner: Owner) -> None:
        siblings = self._pods_of[owner]
        siblings.uids.discard(uid)
        if siblings.uids:
            return
        del self._pods_of[owner]
        owners = self._owners[siblings.key]
        owners.discard(owner)
        if not owners:
            del self._owners[siblings.key]

    def _of(self, owner: Owner) -> _Unwatched:
        return self._unwatched.setdefault(owner, _Unwatched())

    def count_creation(self, owner: Owner, attempt: int, name: str, now: datetime) -> None:
        """Take in that a pod was created for `attempt`."""
        known = self._of(owner)
        if known.creations_attempt != attempt:
            known.creations, known.creations_attempt = {}, attempt
        known.creations[name] = counted(known.creations.get(name), now)

    def put_service(self, owner: Owner, obj: Json) -> None:
        """Take in the rendezvous Service of a job."""
        attempt = (obj["spec"].get("selector") or {}).get(names.LABEL_ATTEMPT, "")
        self._of(owner).service = ServiceView(
            host=obj["spec"]["clusterIP"],
            attempt=int(attempt) if attempt.isdecimal() else -1,
            port=obj["spec"]["ports"][0]["port"],
        )
        self.put_child(owner, SERVICE, obj)

    def drop_service(self, owner: Owner) -> None:
        """Take in that a job has no Service."""
        known = self._of(owner)
        known.service = None
        for child, version in list(known.children.versions.items()):
            if child.kind == SERVICE:
                known.children.drop(child, version)

    def put_child(self, owner: Owner, kind: Kind, obj: Json) -> None:
        """Take in that a job's Service, claim, NetworkPolicy or PodGroup exists.

        One that has only lost our label leaves the watch like one that is deleted, with the version at which it lives.
        """
        if _version(obj) >= self._gone.get(obj["metadata"]["uid"], 0):
            self._gone.pop(obj["metadata"]["uid"], None)
            self._of(owner).children.put(Child(kind, obj["metadata"]["name"]), obj)

    def forget_child(self, owner: Owner, child: Child) -> None:
        """Take in that one was deleted on purpose."""
        self._of(owner).children.forget(child)

    def drop_child(self, kind: Kind, obj: Json) -> Key | None:
        """Take in that one is gone, or has lost our label; the key of its job, if that was news."""
        version, found = _version(obj), self.job_of(obj)
        self._gone[obj["metadata"]["uid"]] = version
        if found is None or not self._drop(found[1], Child(kind, obj["metadata"]["name"]), version):
            return None
        return found[0]

    def end_children(
        self, kind: Kind, namespace: str | None, there: Set[tuple[str, str]], version: int | None = None
    ) -> list[Key]:
        """Take in what a complete list of one kind lacks; `there` are the namespaces and names of what it has. Without
        a version nothing of this kind counts as known any more.

        Returns:
            the jobs of what was known to exist.
        """
        losers: list[Key] = []
        for key, obj in self._jobs.items():
            owner = Owner(key.namespace, obj["metadata"]["uid"])
            if namespace not in (None, key.namespace) or (known := self._unwatched.get(owner)) is None:
                continue
            for child, seen in list(known.children.versions.items()):
                lacking = child.kind == kind and (key.namespace, child.name) not in there
                if lacking and self._drop(owner, child, seen if version is None else version):
                    losers.append(key)
        return losers

    def _drop(self, owner: Owner, child: Child, version: int) -> bool:
        known = self._unwatched.get(owner)
        if known is None or not known.children.drop(child, version):
            return False
        if child.kind == SERVICE:
            known.service = None
        return True

    def is_lost(self, owner: Owner, kind: Kind, name: str) -> bool:
        """Whether a child was there and is gone."""
        known = self._unwatched.get(owner)
        return known is not None and Child(kind, name) in known.children.lost

    def key_of(self, child: Json) -> Key:
        """The key of the job that a pod or another child belongs to, or to an earlier job of the same name. The label
        of a job that is known leads to its name, which it need not be."""
        key = key_of_pod(child)
        return key if controller_of(child) else self._labelled.get(key, key)

    def job_of(self, child: Json) -> tuple[Key, Owner] | None:
        """The job whose child an object is, if it is known: by its controller, or where it has none, which a claim that
        is retained has not, by its label."""
        key = self.key_of(child)
        job = self._jobs.get(key)
        if job is None or controller_of(child).get("uid", job["metadata"]["uid"]) != job["metadata"]["uid"]:
            return None
        return key, Owner(key.namespace, job["metadata"]["uid"])

    def put_log(self, owner: Owner, pod_uid: str, tail: str) -> None:
        """Take in the tail of a pod's log; empty if it cannot be read."""
        self._of(owner).logs[pod_uid] = tail

    def put_warning(self, owner: Owner, pod_uid: str, warning: PodWarning) -> None:
        """Take in what the events of a pod say."""
        self._of(owner).warnings[pod_uid] = warning

    def put_report(self, owner: Owner, report: TrainerReport) -> None:
        """Take in what a job's trainer reports."""
        self._of(owner).report = report

    def end_lists(self, namespace: str | None, jobs: Listed, pods: Listed) -> set[Key]:
        """Take in what complete lists of one namespace lack: it is gone, unless it is newer. What they have was put
        before.

        Returns:
            the keys of jobs that were there before or are there now, and of those that pods are left of.
        """
        before = {key for key in self._jobs if namespace in (None, key.namespace)}
        for key in before:
            obj = self._jobs[key]
            if obj["metadata"]["uid"] not in jobs.uids and _version(obj) <= jobs.version:
                self.drop_job(obj, jobs.version)
        self._listed.add(namespace)
        for uid, known in list(self._pods.items()):
            in_scope = namespace in (None, known.owner.namespace)
            if in_scope and uid not in pods.uids and known.version <= pods.version:
                self.forget_pod(uid, pods.version)
        keys = before.union(self._owners, self._lost)
        return {key for key in keys if namespace in (None, key.namespace)}

    def expire(self, version: int) -> None:
        """Forget the gone that were gone before the last round of lists; `version` is this round's."""
        self._gone = {uid: at for uid, at in self._gone.items() if at > self._last_list}
        live = {Owner(key.namespace, obj["metadata"]["uid"]) for key, obj in self._jobs.items()}
        self._unwatched = {owner: known for owner, known in self._unwatched.items() if owner in live}
        self._last_list = version


def _place(pod: PodView) -> tuple[int, bool, int, str]:
    """By attempt and node rank; pods that wait for a rank come last."""
    return pod.attempt, pod.node_rank is None, pod.node_rank or 0, pod.name


def _labelled(key: Key) -> Key:
    """The key by which `key_of_pod` knows a job's child that has nothing but its labels."""
    return Key(key.namespace, names.dns_label(key.name))


def _version(obj: Json) -> int:
    return int(obj["metadata"]["resourceVersion"])
