"""One look at one job: read the cache, ask `core.plan`, carry it out, write the status.

A pass runs until there is nothing left to do: when a Service has got its address the pods can follow at once, without
waiting for an event. The status in between is not worth a write; where it must be on record before anything else, the
plan says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeVar

from ddpjob_operator import metrics
from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus, Notification
from ddpjob_operator.cluster.apply import Applier
from ddpjob_operator.cluster.cache import Cache, Json
from ddpjob_operator.cluster.figures import count, count_deleted, figures
from ddpjob_operator.cluster.owners import Key, Owner
from ddpjob_operator.cluster.rejections import Rejected
from ddpjob_operator.cluster.status_poll import StatusPoller, Target
from ddpjob_operator.cluster.status_write import Change, StatusWriter, Unanswered, change_between
from ddpjob_operator.core.ledger.notification import end_event, is_pending, recorded_notification
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.stages.invalid_spec import (
    broken_rules,
    plan_internal_error,
    plan_invalid_spec,
    unparsable_edit,
)
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.conditions import DEGRADED
from ddpjob_operator.core.values.job import TOO_LARGE, Defaults, Job, Problem
from ddpjob_operator.core.values.observed import Observed
from ddpjob_operator.core.values.trainer_report import TrainerReport
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.events import EventRecorder, Subject
from ddpjob_operator.runtime.leader import Leader
from ddpjob_operator.runtime.webhook import Webhook
from ddpjob_operator.wire.jobs import (
    InvalidJob,
    has_patterns,
    is_left_to_another,
    job_of,
    parse_job,
    parse_status,
    without_broken_rules,
)

logger = logging.getLogger(__name__)

LONGEST_CHAIN = 8
"""Plans carried out in one pass.

A job takes three at most; more means that they do not come to rest, and must not become a storm.
"""

UNSETTLED_SECONDS = 5.0
NOTIFIED_LATER_SECONDS = 30.0
"""Until a notification is offered again for which there was no room."""

UNANSWERED_KEPT = 8
"""Of writes of one status that the API server does not answer, the last ones."""

T = TypeVar("T")


@dataclass(slots=True)
class _LastPass:
    """What a pass over a job leaves for the next one. Only the controller reads and writes it."""

    uid: str
    spec: DDPJobSpec | None = None
    """The last one that could be parsed: a job with pods goes on by it after an edit that cannot."""
    status: DDPJobStatus | None = None
    """The last one that was read or written: it is counted when the job is gone before its end."""
    rejected: Problem | None = None
    """What the API server rejected, until it is tried again: the plan then tries less, or gives the gang back. What is
    final stays: nothing is tried again."""
    notified: Notification | None = None
    """What the notification of its end has come to, until that is on record."""
    unanswered: tuple[Unanswered, ...] = ()
    """Writes of the status that may be on record, of which one is counted once it is seen to be."""
    status_written: float | None = None
    """When the status was last written, on the event loop's clock: mere progress is not written at once again."""
    left_at: int | None = None
    """The job's generation when this replica stood down; None once it has looked at the job again."""


@dataclass(frozen=True, slots=True)
class _View:
    """A job as a pass works on it, in the form that survives even where the spec does not parse."""

    key: Key
    obj: Json
    last: _LastPass
    job: Job | None
    problems: tuple[str, ...] = ()

    @property
    def owner(self) -> Owner:
        return Owner(self.key.namespace, self.last.uid)

    @property
    def status(self) -> DDPJobStatus:
        return self.job.status if self.job else parse_status(self.obj.get("status") or {})

    @property
    def generation(self) -> int:
        return _generation(self.obj)


@dataclass(eq=False)
class Controller:
    """`reconcile` is called by the queue, `on_report` by the status poller."""

    client: Client
    cache: Cache
    recorder: EventRecorder
    defaults: Callable[[str], Defaults]
    """What holds for the jobs of a namespace."""
    progress_seconds: float
    enqueue: Callable[[Key], None]
    poller: StatusPoller
    leader: Leader | None
    """None where this replica is the only one."""
    goes_on: Callable[[Key], None] = lambda key: None
    """Called while a pass over a job gets on."""
    webhook: Webhook | None = None
    """Where the ends of jobs are notified; None where they are not."""
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _applier: Applier = field(init=False)
    _writer: StatusWriter = field(init=False)
    _last: dict[Key, _LastPass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._applier = Applier(self.client, self.cache, self._report, self.goes_on)
        self._writer = StatusWriter(self.client, self.cache)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one job where its plan wants it.

        Returns:
            seconds after which to look again even if nothing happens, or None.

        Raises:
            ApiError: something that may pass; the queue tries again.
        """
        if self.leader is not None:
            self.leader.begin_pass()
        if not (self._leading and self.cache.is_listed(key.namespace)):
            if not self._leading:
                self.cache.take_dropped(key)  # the leader counts it
            if self.cache.job(key) is None:
                self._forget(key)
            return None  # everything is queued anew when this replica begins to lead, and with every list
        obj = self.cache.job(key)
        await self._release_unclaimed(key, None if obj is None or is_left_to_another(obj) else obj["metadata"]["uid"])
        for _ in range(LONGEST_CHAIN):
            view = await self._view(key)
            if view is None or is_left_to_another(view.obj):
                self._forget(key)
                return None
            decided = await self._decided(view)
            self._notify(view, view.status)  # before a job whose time to live is over is deleted
            if decided.confirm_first and not await self._writer.is_current(key, view.obj):
                continue
            if decided.status_first and not await self._write(view, decided):
                continue
            blocked = view.last.rejected is not None and not view.last.rejected.final
            if blocked:
                view.last.rejected = None
            if view.job is not None and decided.actions:
                refusal = await self._applier.carry_out(view.job, decided.actions)
                if refusal is not None:
                    return await self._report_rejection(view, refusal)
            elif not blocked:
                if view.job is None:
                    await self._release_unclaimed(key, None)
                return await self._settle(view, decided)
            # what was done, or is no longer in the way, may allow the next step
        logger.error("%s: %d plans in a row did not come to rest", key, LONGEST_CHAIN)
        return UNSETTLED_SECONDS

    async def _release_unclaimed(self, key: Key, uid: str | None) -> None:
        """Pods that no plan is made for, since they do not belong to the job `uid`, wait for nobody to put their end on
        record."""
        for failure in await self._applier.release_all(key, self.cache.unclaimed(key, uid)):
            if uid is None:
                raise failure
            logger.warning("%s: a pod keeps its finalizer: %s", key, failure)

    @property
    def _leading(self) -> bool:
        return self.leader is None or self.leader.leading

    async def _view(self, key: Key) -> _View | None:
        obj = self.cache.job(key)
        if obj is None:
            return None
        last = self._last.get(key)
        if last is None or last.uid != obj["metadata"]["uid"]:  # a new job of the same name
            self._count_deleted(key)
            last = self._last[key] = _LastPass(obj["metadata"]["uid"])
        if last.left_at not in (None, _generation(obj)):
            last.spec = None  # another replica may have followed an edit that this one has not seen
        if self._leading:  # a pass may still be under way that began before `stand_down`
            last.left_at = None
        try:
            job = await _aside(obj, lambda: parse_job(obj))
            last.spec = job.spec
        except InvalidJob as error:
            if last.spec is not None:
                job = replace(job_of(obj, last.spec), rejected_edit=unparsable_edit(error.problems))
            elif (sound := await _aside(obj, lambda: without_broken_rules(obj))) is not None:
                job = replace(sound, rejected_edit=broken_rules(error.problems))
            else:
                return self._counted(_View(key, obj, last, None, error.problems))
        last.status = job.status
        return self._counted(_View(key, obj, last, job))

    def _counted(self, view: _View) -> _View:
        """Make up for a write whose answer was lost, if the object shows that it was done."""
        late = view.last.unanswered
        view.last.unanswered = tuple(write for write in late if write.is_open(view.obj))
        done = next((write for write in late if write.is_recorded(view.obj)), None)
        if done is not None:
            self._record(view, done.before, done.decided)
        return view

    def _record(self, view: _View, before: DDPJobStatus, decided: Plan) -> None:
        """Count what a write has put on record, and post its events."""
        count(view.key.namespace, view.job, before, decided.status)
        for event in decided.events:
            self.recorder.record(_subject(view.key, view.owner.uid), event)

    async def _decided(self, view: _View) -> Plan:
        """What to do. An internal error is written into the status as well."""
        try:
            decided = await self._decide(view)
            if self.webhook is None:
                return decided
            status = recorded_notification(view.status, decided.status, view.last.notified)
            again = is_pending(view.status) and not is_pending(status)  # a deletion may have waited for it
            return replace(decided, status=status, requeue_after=0.0 if again else decided.requeue_after)
        except Exception as error:
            await self._write(view, plan_internal_error(view.status, error, self.clock(), view.generation))
            raise

    async def _decide(self, view: _View) -> Plan:
        job, now = view.job, self.clock()
        if job is None:
            return plan_invalid_spec(view.status, view.problems, now, view.generation)
        observed = replace(
            self.cache.observed(view.owner),
            problem=view.last.rejected,
            silent_seconds=self.poller.silent_seconds(view.key),
        )
        defaults = self.defaults(view.key.namespace)
        return await _aside(view.obj, lambda: plan(job, observed, now, defaults))

    async def _settle(self, view: _View, decided: Plan) -> float | None:
        """Nothing is left to do: write down what has changed, unless it can wait, and keep an eye on the trainer."""
        due: float | None = None
        if not decided.status_first:
            change = change_between(view.obj.get("status") or {}, decided.status)
            due = self._wait_of(change, view.last)
            if due is None and not await self._write(view, decided):
                return 0.0
        self._update_metrics(view, decided.status)
        self._watch_trainer(view, decided.status)
        waits = (due, decided.requeue_after, self._notify(view, decided.status))
        return min((wait for wait in waits if wait is not None), default=None)

    def _wait_of(self, change: Change, last: _LastPass) -> float | None:
        """Seconds that a change of mere progress should wait, or None to write it (if there is any) now."""
        if not change.only_progress or last.status_written is None:
            return None
        left = last.status_written + self.progress_seconds - asyncio.get_running_loop().time()
        return left if left > 0 else None

    async def _write(self, view: _View, decided: Plan) -> bool:
        """Write the status if it differs.

        False if the object has changed meanwhile, so that the decision must be made again.
        """
        before, after = view.status, decided.status
        change = change_between(view.obj.get("status") or {}, after)
        if change.empty:
            return True
        try:
            written = await self._writer.write(view.key, view.obj, change)
        except ApiError as error:
            if error.too_large:  # the status cannot say it: spec and status share the room of one object
                self.recorder.record(_subject(view.key, view.owner.uid), _no_room(error))
            elif error.may_be_done:
                write = Unanswered(view.obj["metadata"]["resourceVersion"], before, decided)
                view.last.unanswered = (*view.last.unanswered, write)[-UNANSWERED_KEPT:]
            raise
        if not written:
            return False
        view.last.unanswered = ()
        view.last.status_written = asyncio.get_running_loop().time()
        view.last.status = after
        self._record(view, before, decided)
        return True

    def _notify(self, view: _View, status: DDPJobStatus) -> float | None:
        """Hand over the notification of the job's end if it is due; seconds until it is to be offered again, or None.

        It is due only if the status on record says so.
        """
        if self.webhook is None or not self._leading or not is_pending(status) or view.last.notified is not None:
            return None

        def document() -> bytes:
            return json.dumps(end_event(view.obj["metadata"], view.job, status)).encode()

        def done(delivered: bool) -> None:
            last = self._last.get(view.key)
            if last is not None and last.uid == view.owner.uid:
                last.notified = Notification.DELIVERED if delivered else Notification.FAILED
                self.enqueue(view.key)

        return None if self.webhook.offer(view.owner.uid, document, done) else NOTIFIED_LATER_SECONDS

    def _report(self, job: Job, event: Event) -> None:
        self.recorder.record(_subject(Key(job.namespace, job.name), job.uid), event)

    async def _report_rejection(self, acted_on: _View, refusal: Rejected) -> float | None:
        """Write into the status what the API server has rejected.

        Trying again is the queue's business, with its backoff.
        """
        key, acted_on.last.rejected = acted_on.key, refusal.problem
        error = ApiError(0, refusal.problem.reason, refusal.problem.message)
        view = await self._view(key)  # as the calls have left it
        if view is not None:
            decided = await self._decided(view)
            if self._wait_of(change_between(view.obj.get("status") or {}, decided.status), view.last) is None:
                await self._write(view, decided)
            if decided.status.is_final:  # it never changes again: no condition can say so
                self.recorder.record(_subject(key, view.owner.uid), _refused(refusal.problem))
            self._update_metrics(view, decided.status)
            self._watch_trainer(view, decided.status)  # a gang may well train while a spare is refused
            error.look_within = decided.requeue_after  # a deadline does not wait for a backoff
        if refusal.problem.final:
            logger.info("%s: %s; not tried again", key, refusal.problem.message)
            return None
        raise error from None

    def _update_metrics(self, view: _View, status: DDPJobStatus) -> None:
        if not self._leading:
            return  # this pass began before `stand_down`
        image = self.defaults(view.key.namespace).trainer_image
        metrics.JOBS.put(view.key, figures(view.key, view.job, status, image))

    def _watch_trainer(self, view: _View, status: DDPJobStatus) -> None:
        key, target = view.key, trainer_of(view.owner.uid, status, self.cache.observed(view.owner))
        if not self._leading or target is None or view.job is None or view.job.deleting:
            self.poller.drop(key)
        else:
            self.poller.watch(key, target, self.on_report)

    def on_report(self, key: Key, target: Target, report: TrainerReport) -> None:
        """Take in a trainer's answer, and look at the job."""
        owner = Owner(key.namespace, target.uid)
        obj = self.cache.job(key)
        if obj is None or obj["metadata"]["uid"] != target.uid:
            self.poller.drop(key)
            return
        self.cache.put_report(owner, report)
        self.enqueue(key)

    def stand_down(self) -> None:
        """Another replica acts from now on: ask no trainer, and show no job's figures, which would be counted twice.
        What the API server rejected is forgotten: it may accept it by the time that this replica leads again."""
        self.poller.drop_all()
        if self.webhook is not None:
            self.webhook.drop_all()
        for key, last in self._last.items():
            last.rejected = last.status = None
            if last.left_at is None:
                last.left_at = _generation(self.cache.job(key) or {})
        metrics.JOBS.clear()

    def _forget(self, key: Key) -> None:
        """The job is gone, or another controller's."""
        if self.cache.job(key) is None:
            self._count_deleted(key)
        self._last.pop(key, None)
        self.poller.drop(key)
        metrics.JOBS.drop(key)

    def _count_deleted(self, key: Key) -> None:
        """Count what a job has held that is gone before its end. What another replica leads is counted there."""
        dropped = self.cache.take_dropped(key)
        last = self._last.get(key)
        if last is None or last.status is None:
            last = _never_looked_at(dropped)
        if last is None or last.spec is None or last.status is None or last.status.is_final or not self._leading:
            return
        count_deleted(key.namespace, last.status, last.spec.accelerators_per_node, self.clock())


def _never_looked_at(dropped: Json | None) -> _LastPass | None:
    """A job that was deleted between the list of this process and the first pass over it."""
    if dropped is None or is_left_to_another(dropped):
        return None
    try:
        job = parse_job(dropped)
    except InvalidJob:
        return None
    return _LastPass(job.uid, job.spec, job.status)


def _generation(obj: Json) -> int:
    return int((obj.get("metadata") or {}).get("generation", 1))


def _subject(key: Key, uid: str) -> Subject:
    return Subject(API_VERSION, KIND, *key, uid)


def _refused(problem: Problem) -> Event:
    first, _, _ = problem.message.partition("\n")
    return Event("Warning", DEGRADED, f"{problem.reason}: {first}")


def _no_room(error: ApiError) -> Event:
    message = f"the spec leaves no room for the status: {error.message}; shorten args, env or podTemplate"
    return Event("Warning", TOO_LARGE, message)


def trainer_of(uid: str, status: DDPJobStatus, observed: Observed) -> Target | None:
    """The trainer to ask for progress: node rank 0 of the current attempt, while it runs. One that has to leave still
    saves a snapshot. With live recovery another one, until there is a new node rank 0, and that one trains.
    """
    if status.is_final:
        return None
    lost = status.internal.lost_pods
    gang = (pod for pod in observed.pods if pod.attempt == status.attempt and pod.running and pod.uid not in lost)
    running = {pod.node_rank: pod.pod_ip for pod in gang if pod.node_rank is not None and pod.pod_ip}
    if 0 not in lost.values():
        return Target(running[0], uid, status.attempt) if 0 in running else None
    hosts = [running[node_rank] for node_rank in sorted(running)]
    return Target(hosts[0], uid, status.attempt, *hosts[1:2]) if hosts else None


async def _aside(obj: Json, work: Callable[[], T]) -> T:
    """What `work` makes of values, in a thread where a tenant's patterns are part of them.

    32 patterns take 0.1 s to compile and 1.1 s to match. One at a time holds up the event loop, while it is
    compiled, for some milliseconds; RE2 matches without Python's lock.
    """
    return await asyncio.to_thread(work) if has_patterns(obj) else work()
