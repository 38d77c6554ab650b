"""Carries out what `core.plan` decided: actions become calls to the API server, and their answers go into the cache.

Every call may be repeated: after a crash, after a lost answer, by a second operator. So "it exists already" is
success when what exists is ours and of the same attempt, "not found" is success for a deletion, and a deletion names
the uid that it means; of a PodGroup the name is enough, which no other job or attempt gives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_never

from ddpjob_operator.api import KIND
from ddpjob_operator.cluster import paths, pod_warnings
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.children import CLAIM, POD_GROUP, SERVICE, Child, Kind
from ddpjob_operator.cluster.owners import Key, Owner, controller_of, owner_of
from ddpjob_operator.cluster.rejections import (
    Rejected,
    changed_labels,
    forbids,
    keeps_whole,
    not_made_for,
    problem_of,
    problem_with,
    refuses,
    relabelled,
    taken,
    without_address,
    without_whole,
)
from ddpjob_operator.core.failure.log_tail import last_states, whole_lines
from ddpjob_operator.core.gang.members import RESTART_GRACE_SECONDS
from ddpjob_operator.core.manifests.pod_group import unknown_kind
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
    Event,
    PointService,
    ReadLog,
    ReadWarnings,
    ReleasePod,
    SyncPod,
)
from ddpjob_operator.core.values.job import ADMISSION_FAILED, Job
from ddpjob_operator.core.values.names import (
    FINALIZER,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_NODE_RANK,
    LABEL_NODES,
    LABEL_SYNC,
    TRAINER_CONTAINER,
)
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.paths import events
from ddpjob_operator.wire.pods import is_held

logger = logging.getLogger(__name__)

FIRST_BATCH = 8
"""Pods that are created at once; each batch after it is twice as large. A gang of this size waits for no batch."""

CONFLICTS = 2
"""After which a creation is not tried again in this pass."""

LOG_LINES = 40
LOG_BYTES = 4096
LOG_SECONDS = 3.0
"""How much of a failed pod's log is kept, and how long its node may take to send it: a restart waits for it."""

_LOG_READ_BYTES = LOG_LINES * (16 << 10)
"""The kubelet cuts the lines off at their end, where a traceback says what it was about; so more are read than kept.
Container runtimes write a line in parts of at most 16 KiB, which are lines to the kubelet: so long are those of a
progress bar, which has no line end for hours.
"""


@dataclass(frozen=True, slots=True)
class Applier:
    """Carries out actions for any job, through one client into one cache."""

    client: Client
    cache: Cache
    report: Callable[[Job, Event], None] = lambda job, event: None
    """Called with what a person should hear of the job."""
    goes_on: Callable[[Key], None] = lambda key: None
    """Called with the job when an action has ended: those of 1,024 pods may take minutes."""

    async def carry_out(self, job: Job, actions: Sequence[Action]) -> Rejected | None:
        """All actions of one plan, at once; but the Service goes first, since new pods carry its address, and pods are
        created in growing batches.

        Returns:
            the first refusal, if there was one; all other actions but the pods of later batches were carried out.

        Raises:
            ApiError: a call failed for a reason that may pass; every other action has been tried too.
        """
        results = await self._all(job, [action for action in actions if isinstance(action, PointService)])
        if results and self.cache.observed(_owner(job)).service is None:
            actions = [action for action in actions if not isinstance(action, CreatePod)]
        creations = [action for action in actions if isinstance(action, CreatePod)]
        others = [action for action in actions if not isinstance(action, PointService | CreatePod)]
        of_others, of_creations = await asyncio.gather(self._all(job, others), self._in_batches(job, creations))
        results += of_others + of_creations
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Rejected):
                raise failure
        return next((failure for failure in failures if isinstance(failure, Rejected)), None)

    async def _in_batches(self, job: Job, creations: Sequence[CreatePod]) -> list[BaseException | None]:
        """Growing batches, as the Job controller's slow start: what is refused once is not asked a thousand times. A
        webhook that fails now and then, or a quota that conflicts, is no reason to stop, unless a whole batch fails."""
        results: list[BaseException | None] = []
        size = FIRST_BATCH
        while len(results) < len(creations):
            batch = await self._all(job, creations[len(results) : len(results) + size])
            results += batch
            failures = [failure for failure in batch if failure is not None]
            if len(failures) == len(batch) or not all(_may_pass(failure) for failure in failures):
                break
            size *= 2
        return results

    async def _all(self, job: Job, actions: Sequence[Action]) -> list[BaseException | None]:
        return await asyncio.gather(*(self._one(job, action) for action in actions), return_exceptions=True)

    async def _one(self, job: Job, action: Action) -> None:
        try:
            await self._act(job, action)
        except ApiError as error:
            if not (isinstance(action, AssignPod | DeletePod | PointService | ReleasePod | SyncPod) and forbids(error)):
                raise
            raise Rejected(problem_with(action.name, error), status=error.status) from error
        finally:
            self.goes_on(Key(job.namespace, job.name))

    async def _act(self, job: Job, action: Action) -> None:
        match action:
            case CreatePVC():
                await self._create_claim(job, action)
            case CreateService():
                await self._create_service(job, action)
            case PointService():
                await self._point_service(job, action)
            case CreatePod():
                await self._create_pod(job, action)
            case DeletePod():
                await self._delete_pod(job, action)
            case ReleasePod():
                await self.release(job.namespace, action)
            case AssignPod():
                labels = {LABEL_ATTEMPT: action.attempt, LABEL_NODE_RANK: action.node_rank, LABEL_NODES: action.nodes}
                await self._label_pod(job, action, {name: str(value) for name, value in labels.items()})
            case SyncPod(sync=sync):
                await self._label_pod(job, action, {LABEL_SYNC: sync})
            case CreateChild():
                await self._create_child(job, action)
            case DeletePodGroup():
                await self._delete_pod_group(job, action)
            case ReadLog():
                await self._read_log(job, action)
            case ReadWarnings():
                await self._read_warnings(job, action)
            case DeleteJob():
                await self._delete_job(job, action)
            case _:
                assert_never(action)

    async def _create_claim(self, job: Job, action: CreatePVC) -> None:
        """A claim that is retained outlives its job on purpose, so an existing one of that name is used, unless
        it is about to go: its own job was not to keep it.
        """
        collection, name = paths.claims(job.namespace), action.manifest["metadata"]["name"]
        lost = self.cache.is_lost(_owner(job), CLAIM, name)  # its watch may be faster than the answer
        try:
            claim = await self._create(collection, "persistentvolumeclaims", action.manifest)
        except (ApiError, Rejected) as error:
            claim = await self._existing(f"{collection}/{name}", "persistentvolumeclaims", error)
            if claim["metadata"].get("deletionTimestamp") or controller_of(claim).get("uid", job.uid) != job.uid:
                raise _not_ours(error, "PersistentVolumeClaim", claim) from None
            if action.only_own and _label_of_job(claim) != _label_of_job(action.manifest):
                raise Rejected(not_made_for(claim)) from None
        else:
            self._report_restored(lost, job, CLAIM, name)
        self.cache.put_child(_owner(job), CLAIM, claim)

    async def _create_service(self, job: Job, action: CreateService) -> None:
        collection, name = paths.services(job.namespace), action.manifest["metadata"]["name"]
        lost = self.cache.is_lost(_owner(job), SERVICE, name)
        try:
            service = await self._create_at_its_address(collection, action.manifest)
        except (ApiError, Rejected) as error:
            service = await self._existing(f"{collection}/{name}", "services", error)
            if owner_of(service) != _owner(job):
                raise _not_ours(error, "Service", service) from None
        else:
            self._report_restored(lost, job, SERVICE, name)
        self._put_service(job, service)

    async def _create_at_its_address(self, collection: str, manifest: Json) -> Json:
        """With the address of the Service that is gone, which pods that run have; another may have got it since."""
        try:
            return await self._create(collection, "services", manifest)
        except Rejected as error:
            if error.status != 422 or "clusterIP" not in manifest["spec"]:
                raise
        spec = {name: value for name, value in manifest["spec"].items() if name != "clusterIP"}
        return await self._create(collection, "services", {**manifest, "spec": spec})

    async def _point_service(self, job: Job, action: PointService) -> None:
        path = f"{paths.services(job.namespace)}/{action.name}"
        try:
            service = await self._select(path, action, self.cache.service_version(_owner(job), action.name))
        except ApiError as error:
            if not error.not_found:
                raise
            # Somebody deleted it: the next look creates it anew, with the selector that it needs now.
            self.cache.drop_service(_owner(job))
        else:
            self._put_service(job, service)

    def _put_service(self, job: Job, service: Json) -> None:
        if (problem := without_address(service)) is not None:
            self.cache.drop_service(_owner(job))  # no pod is to be created with the address that it had
            raise Rejected(problem)
        self.cache.put_service(_owner(job), service)

    async def _select(self, path: str, action: PointService, seen: int | None) -> Json:
        """Guarded by the resourceVersion: a call that was on its way when another replica began to lead, and that
        arrives after the call of that one, would point to an attempt that is over."""
        try:
            return await self.client.merge_patch(path, "services", _selecting(action, seen))
        except ApiError as error:
            if not error.conflict:
                raise
        service = await self.client.get(path, "services")
        seen = int(service["metadata"]["resourceVersion"])
        return await self.client.merge_patch(path, "services", _selecting(action, seen))

    async def _create_pod(self, job: Job, action: CreatePod) -> None:
        collection = paths.pods(job.namespace)
        try:
            if action.whole:
                await self._try_whole(collection, action.manifest)
            pod = await self._create(collection, "pods", action.manifest)
        except ApiError as error:
            if not error.already_exists:
                raise
            pod = await self.client.get(f"{collection}/{action.name}", "pods")
            if owner_of(pod) != _owner(job):
                raise Rejected(taken("Pod", pod)) from None
            await self._check_labels(job, action.manifest, pod, created=False)
        else:
            await self._check_labels(job, action.manifest, pod, created=True)
            if action.node_rank == 0:  # all pods of an attempt are alike, and each event is a call
                self._report_shorter_grace(job, action.manifest, pod)
            self.cache.count_creation(_owner(job), action.attempt, action.name, datetime.now(UTC))
        self.cache.put_pod(pod)

    async def _try_whole(self, collection: str, manifest: Json) -> None:
        """Have the API server say in a dry run what it makes of the resources of the pod as a whole.

        Raises:
            Rejected: it leaves limits out, or can make no dry run.
        """
        tried = await self._create(collection, "pods", manifest, dry_run=True)
        if not keeps_whole(manifest, tried):
            raise Rejected(without_whole(manifest))

    async def _check_labels(self, job: Job, wanted: Json, pod: Json, *, created: bool) -> None:
        """No watch or list shows a pod without our label: it would run for ever, and its finalizer hold its namespace.

        Raises:
            Rejected: it lacks one; then it is deleted.
        """
        if not (changed := changed_labels(wanted, pod, created=created)):
            return
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        await self._delete_pod(job, DeletePod(name, uid, RESTART_GRACE_SECONDS))
        self.cache.forget_pod(uid)
        raise Rejected(relabelled("Pod", pod, changed))

    async def _delete_pod(self, job: Job, action: DeletePod) -> None:
        preconditions = {"uid": action.uid}
        if action.unless_changed and (seen := self.cache.version_of(action.uid)) is not None:
            preconditions["resourceVersion"] = str(seen)
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        if action.grace_seconds is not None:
            body["gracePeriodSeconds"] = action.grace_seconds
        try:
            pod = await self.client.delete(f"{paths.pods(job.namespace)}/{action.name}", "pods", body)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            if error.not_found or await self._is_replaced(job.namespace, action):
                self.cache.forget_pod(action.uid)
            elif not action.unless_changed:
                raise
            return  # one that has changed is in the cache as it is now: the next plan decides
        if pod.get("kind") == "Pod" and "deletionTimestamp" in pod["metadata"]:
            self.cache.put_pod(pod)
            if action.release and is_held(pod):
                await self.release(job.namespace, ReleasePod(action.name, action.uid))
        else:
            self.cache.forget_pod(action.uid)

    async def release(self, namespace: str, action: ReleasePod) -> None:
        """Remove our finalizer and no other, if this pod has it."""
        pod = await self._released(namespace, action)
        if pod is None:
            self.cache.forget_pod(action.uid)
        elif pod["metadata"].get("deletionGracePeriodSeconds") == 0 and not pod["metadata"].get("finalizers"):
            self.cache.drop_pod(pod)  # its kubelet was done with it: this was what kept it
        else:
            self.cache.put_pod(pod)

    async def _released(self, namespace: str, action: ReleasePod) -> Json | None:
        """The pod without our finalizer; None if it is gone. Most pods have no other, so one call is enough."""
        path, finalizers = f"{paths.pods(namespace)}/{action.name}", [FINALIZER]
        while True:
            try:
                return await self.client.json_patch(path, "pods", _without_ours(action.uid, finalizers))
            except ApiError as error:
                if error.not_found:
                    return None
                if error.status not in (409, 422):
                    raise
                pod = await self._read_pod(namespace, action.name)
                if pod is None or pod["metadata"]["uid"] != action.uid:
                    return None
                found = pod["metadata"].get("finalizers") or []
                if FINALIZER not in found:
                    return pod
                if found == finalizers:  # it was refused for another reason
                    raise
                finalizers = found

    async def release_all(self, job: Key, pods: Sequence[ReleasePod]) -> list[ApiError]:
        """Returns what kept pods from being released."""

        async def released(pod: ReleasePod) -> None:
            try:
                await self.release(job.namespace, pod)
            finally:
                self.goes_on(job)

        results = await asyncio.gather(*map(released, pods), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ApiError):
                raise result
        return [result for result in results if isinstance(result, ApiError)]

    async def _is_replaced(self, namespace: str, action: DeletePod | AssignPod | SyncPod) -> bool:
        """Whether the pod of that name is another one, which a 409 can mean, but need not."""
        pod = await self._read_pod(namespace, action.name)
        return pod is None or bool(pod["metadata"]["uid"] != action.uid)

    async def _read_pod(self, namespace: str, name: str) -> Json | None:
        try:
            pod = await self.client.get(f"{paths.pods(namespace)}/{name}", "pods")
        except ApiError as error:
            if error.not_found:
                return None
            raise
        self.cache.put_pod(pod)
        return pod

    async def _label_pod(self, job: Job, action: AssignPod | SyncPod, labels: dict[str, str]) -> None:
        """The uid in the patch keeps it from a pod that has got the name since: a 409, or a 422 of older servers."""
        body = {"metadata": {"uid": action.uid, "labels": labels}}
        try:
            pod = await self.client.merge_patch(f"{paths.pods(job.namespace)}/{action.name}", "pods", body)
        except ApiError as error:
            if not (error.not_found or (error.status in (409, 422) and await self._is_replaced(job.namespace, action))):
                raise
            self.cache.forget_pod(action.uid)
        else:
            self.cache.put_pod(pod)

    async def _create_child(self, job: Job, action: CreateChild) -> None:
        version, kind = action.manifest["apiVersion"], action.manifest["kind"]
        name = action.manifest["metadata"]["name"]
        collection, resource = paths.children(version, kind, job.namespace)
        lost = self.cache.is_lost(_owner(job), Kind(version, kind), name)
        try:
            child = await self._create(collection, resource, action.manifest)
        except (ApiError, Rejected) as error:
            if isinstance(error, Rejected) and error.status == 404 and not error.problem.final:
                raise Rejected(unknown_kind(version, kind)) from None
            child = await self._existing(f"{collection}/{name}", resource, error)
            if owner_of(child) != _owner(job):
                raise _not_ours(error, kind, child) from None
            if kind == "Pod":
                await self._check_labels(job, action.manifest, child, created=False)
        else:
            self._report_restored(lost, job, Kind(version, kind), name)
            if kind == "Pod":
                await self._check_labels(job, action.manifest, child, created=True)
                self.cache.count_creation(_owner(job), job.status.attempt, name, datetime.now(UTC))
        if kind == "Pod":
            self.cache.put_pod(child)
        else:
            self.cache.put_child(_owner(job), Kind(version, kind), child)

    async def _delete_pod_group(self, job: Job, action: DeletePodGroup) -> None:
        collection, resource = paths.children(action.api_version, POD_GROUP, job.namespace)
        try:
            await self.client.delete(f"{collection}/{action.name}", resource)
        except ApiError as error:
            if not forbids(error) and (error.conflict or not 400 <= error.status < 500 or error.status == 429):
                raise
            # roles or a policy of one's own, a webhook that is down; it must not hold up the job, with which it goes
            if not error.not_found:
                logger.warning("PodGroup %s/%s stays until its job is deleted: %s", job.namespace, action.name, error)
        self.cache.forget_child(_owner(job), Child(Kind(action.api_version, POD_GROUP), action.name))

    def _report_restored(self, lost: bool, job: Job, kind: Kind, name: str) -> None:
        if not lost:
            return
        empty = "; its volume is new and has no snapshot" if kind == CLAIM else ""
        message = f"{kind.name} {name} was deleted while the job needs it; it was created again{empty}"
        self.report(job, Event("Warning", "ChildRestored", message))

    def _report_shorter_grace(self, job: Job, wanted: Json, pod: Json) -> None:
        """A webhook has taken time away that the ranks count on: they are killed while they save."""
        asked, has = ((obj.get("spec") or {}).get("terminationGracePeriodSeconds") for obj in (wanted, pod))
        if asked is None or has is None or has >= asked:
            return
        message = (
            f"an admission webhook or policy has cut terminationGracePeriodSeconds from {asked} to {has}: a snapshot "
            f"that takes longer than that when a pod has to go is lost; set shutdownSeconds to {max(1, has - 15)} or "
            "less, or ask the policy's administrator for an exception"
        )
        self.report(job, Event("Warning", "GraceShortened", message))

    async def _read_log(self, job: Job, action: ReadLog) -> None:
        path = f"{paths.pods(job.namespace)}/{action.name}/log"
        query = {"container": TRAINER_CONTAINER, "tailLines": str(LOG_LINES), "limitBytes": str(_LOG_READ_BYTES)}
        try:
            async with asyncio.timeout(LOG_SECONDS):
                text = await self.client.read(path, "pods/log", **query)
        except (ApiError, TimeoutError) as error:
            logger.info("no log of pod %s/%s: %s", job.namespace, action.name, error or "its node does not answer")
            text = b""
        self.cache.put_log(_owner(job), action.uid, whole_lines(last_states(text), LOG_BYTES).decode(errors="replace"))

    async def _read_warnings(self, job: Job, action: ReadWarnings) -> None:
        found: list[Json] = []
        try:
            found, _ = await self.client.list(
                events(job.namespace), "events", fieldSelector=pod_warnings.selector(action.uid)
            )
        except ApiError as error:
            logger.info("no events of pod %s/%s: %s", job.namespace, action.name, error)
        self.cache.put_warning(_owner(job), action.uid, pod_warnings.warned(found, datetime.now(UTC)))

    async def _delete_job(self, job: Job, action: DeleteJob) -> None:
        """What it owns goes with it: the garbage collector sees to that."""
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": action.uid},
        }
        known = self.cache.job(Key(job.namespace, job.name))
        try:
            answer = await self.client.delete(f"{paths.jobs(job.namespace)}/{job.name}", "ddpjobs", body)
        except ApiError as error:
            if not (error.object_is_gone or error.conflict):
                raise
            answer = {}
        if answer.get("kind") == KIND:  # a finalizer holds it
            self.cache.put_job(answer)
        elif known is not None and known["metadata"]["uid"] == action.uid:
            self.cache.drop_job(known)

    async def _existing(self, path: str, resource: str, error: ApiError | Rejected) -> Json:
        """The object that a failed creation was for. A quota or a webhook refuses one that exists, too: they are asked
        before its name is.

        Raises:
            ApiError: the creation failed for another reason.
            Rejected: the creation was refused, and there is none.
        """
        if isinstance(error, ApiError):
            if not error.already_exists:
                raise error
            return await self.client.get(path, resource)
        if error.problem.final:
            raise error
        try:
            return await self.client.get(path, resource)
        except ApiError:
            raise error from None

    async def _create(self, collection: str, resource: str, manifest: Json, *, dry_run: bool = False) -> Json:
        try:
            return await self._post(collection, resource, manifest, dry_run=dry_run)
        except ApiError as error:
            if error.already_exists or not refuses(error):
                raise
            raise Rejected(problem_of(manifest, error), status=error.status) from error

    async def _post(self, collection: str, resource: str, manifest: Json, *, dry_run: bool) -> Json:
        """A ResourceQuota is written with each creation that it counts: many at once conflict (409) now and then."""
        for _ in range(CONFLICTS):
            try:
                return await self.client.create(collection, resource, manifest, dry_run=dry_run)
            except ApiError as error:
                if not error.conflict or error.denied:
                    raise
        return await self.client.create(collection, resource, manifest, dry_run=dry_run)


def _without_ours(uid: str, finalizers: Sequence[str]) -> list[Json]:
    """A JSON patch of the pod with this uid and these finalizers: one that has got the name since, or whose finalizers
    have changed, stays as it is. A strategic merge patch could name the one item alone, but adds it where it is not
    there (Kubernetes 1.20).
    """
    rest = [name for name in finalizers if name != FINALIZER]
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": "/metadata/finalizers", "value": list(finalizers)},
        {"op": "replace", "path": "/metadata/finalizers", "value": rest},
    ]


def _may_pass(failure: BaseException) -> bool:
    if isinstance(failure, ApiError):
        return failure.conflict
    return isinstance(failure, Rejected) and failure.problem.reason == ADMISSION_FAILED


def _not_ours(error: ApiError | Rejected, kind: str, found: Json) -> Rejected:
    """The object that was found is another owner's: a refusal stands, and else the name is taken."""
    return error if isinstance(error, Rejected) else Rejected(taken(kind, found))


def _label_of_job(obj: Json) -> str | None:
    found: str | None = (obj["metadata"].get("labels") or {}).get(LABEL_JOB)
    return found


def _owner(job: Job) -> Owner:
    return Owner(job.namespace, job.uid)


def _selecting(action: PointService, seen: int | None) -> Json:
    guard: Json = {} if seen is None else {"metadata": {"resourceVersion": str(seen)}}
    return guard | {"spec": {"selector": action.selector}}
