"""The operator's process: `python -m ddpjob_operator.main`.

Starts the parts, waits for a signal or for the end of one of them, and stops them in the order that leaves nothing
half-done: first no new looks at jobs, then kopf's watches, then the lists and the watches of children; the Lease is
given up last. If a part dies the process ends with an error: the kubelet starts it anew, and what it was doing is
picked up from the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf

from ddpjob_operator import logs, metrics, server
from ddpjob_operator import settings as configuration
from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.child_watch import ChildWatch
from ddpjob_operator.cluster.controller import Controller
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.cluster.resync import Resync
from ddpjob_operator.cluster.status_poll import StatusPoller
from ddpjob_operator.core.ledger.notification import CONTENT_TYPE
from ddpjob_operator.core.values.job import Defaults
from ddpjob_operator.runtime import access
from ddpjob_operator.runtime.certificate import Certificate
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.events import EventRecorder
from ddpjob_operator.runtime.garbage import collect_all_every_hour, keep_collections_short
from ddpjob_operator.runtime.lag import measure_lag
from ddpjob_operator.runtime.leader import Leader, Lease
from ddpjob_operator.runtime.queue import WorkQueue
from ddpjob_operator.runtime.webhook import Webhook
from ddpjob_operator.settings import VERSION, BadSetting, Settings
from ddpjob_operator.shards import Shard, layout, shard_lease
from ddpjob_operator.tenancy import load_defaults
from ddpjob_operator.watching import framework
from ddpjob_operator.watching import handlers as watch

logger = logging.getLogger("ddpjob_operator")

STUCK_SECONDS = 300.0
"""Without a sign of life from a look at a job. Whatever the API server does, each of its calls ends within a minute
once it has a place; while one waits for that, each place that becomes free is such a sign (`runtime.shares`)."""

BEGIN_SECONDS = 30.0
"""kopf starts its watches at once when it has read discovery: two requests, of 15 s at most."""

PASS_SECONDS = 8.0
EVENT_SECONDS = 2.0
FRAMEWORK_SECONDS = 6.0
LAST_SECONDS = 3.0
"""How long the parts are waited for at the end; together less than a pod's usual 30 s."""


class WatchEnded(Exception):
    """A watch has ended for good; without it the operator would not notice what happens."""


@dataclass(eq=False)
class Operator:
    """The parts of one running operator, and what they say of their health."""

    namespaces: tuple[str, ...]
    """Whose objects are watched; none: all of them."""
    watches: framework.Watches
    shard: Shard
    cache: Cache
    queue: WorkQueue[Key]
    controller: Controller
    resync: Resync
    child_watch: ChildWatch
    recorder: EventRecorder
    leader: Leader | None
    watching: bool = False

    def unhealthy(self) -> list[str]:
        """What only a new process can mend."""
        wrong = []
        if self.watching:
            wrong += [f"{task}: has ended" for task in self.watches.dead()]
        if dead := self.queue.dead_workers():
            wrong.append(f"{dead} workers of the queue have ended")
        if (longest := self.queue.longest_pass()) > STUCK_SECONDS:
            wrong.append(f"a look at a job has shown no sign of life for {longest:.0f} s")
        return wrong

    def unready(self) -> list[str]:
        """What keeps this replica from acting, or from standing by with a true picture of the cluster."""
        wrong = [] if self.resync.first_done.is_set() else ["jobs and pods have not been listed yet"]
        if self.resync.first_done.is_set() and not self.resync.healthy:
            wrong.append("the last list of jobs and pods failed")
        if self.leader is not None and not self.leader.known.is_set():
            wrong.append("it is not known yet who leads")
        if not self.watching:
            wrong.append("the watches have not begun yet")
        return wrong


async def run(settings: Settings, defaults: Callable[[str], Defaults]) -> None:
    """Run until SIGTERM or SIGINT. `defaults` gives what holds for the jobs of a namespace.

    Raises:
        ApiError: the API server's configuration cannot be used.
        OSError: a port is taken.
        BadSetting: the certificate of the metrics cannot be used.
        Exception: a part has died.
    """
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with AsyncExitStack() as cleanup:
        operator = await _assemble(settings, defaults, cleanup)
        probes, probe_port = await server.serve_probes(
            settings.probe_port, healthy=operator.unhealthy, ready=operator.unready
        )
        cleanup.push_async_callback(probes.cleanup)
        authorize, tls = await _authorize(settings, cleanup), _certificate(settings, cleanup)
        page, port = await server.serve_metrics(settings.port, authorize, tls)
        cleanup.push_async_callback(page.cleanup)
        logger.info("ddpjob-operator %s serves %s%s, metrics on port %d, probes on port %d", VERSION,
                    ", ".join(operator.namespaces) or "all namespaces",
                    f" of shard {settings.shard} of {settings.shards}" if settings.shards > 1 else "",
                    port, probe_port)  # fmt: skip
        await _run_parts(operator, stop)
    logger.info("stopped")


async def _authorize(settings: Settings, cleanup: AsyncExitStack) -> server.Authorize | None:
    """Who may read /metrics, where that is restricted: reviews are no writes of a leader, and wait for no work."""
    if not settings.metrics_authentication:
        return None
    own = await connect(access.WAITING)
    cleanup.push_async_callback(own.close)
    return access.Access(own, "/metrics").status


def _certificate(settings: Settings, cleanup: AsyncExitStack) -> ssl.SSLContext | None:
    if not settings.metrics_certificate:
        return None
    try:
        certificate = Certificate(Path(settings.metrics_certificate))
    except OSError as error:
        raise BadSetting(
            f"{configuration.PREFIX}METRICS_CERTIFICATE is {settings.metrics_certificate!r}, but must be a folder with "
            f"tls.crt and tls.key: {error}"
        ) from error
    following = asyncio.create_task(certificate.follow(), name="certificate")
    cleanup.callback(following.cancel)
    return certificate.context


def _webhook(settings: Settings, cleanup: AsyncExitStack) -> Webhook | None:
    if not settings.notify_url:
        return None
    webhook = Webhook(settings.notify_url, settings.notify_token, CONTENT_TYPE)
    cleanup.push_async_callback(webhook.close)
    return webhook


def leases_of(settings: Settings, client: Client) -> tuple[Lease, ...]:
    """What a leader has to hold."""
    whole, namespace = settings.lease_name, settings.lease_namespace
    if settings.shards == 1:
        return (Lease(client, namespace, whole, settings.identity),)
    return (
        Lease(client, namespace, whole, layout(settings.shards), shared=True),
        Lease(client, namespace, shard_lease(whole, settings.shard), settings.identity),
    )


async def _assemble(settings: Settings, defaults: Callable[[str], Defaults], cleanup: AsyncExitStack) -> Operator:
    client = await connect(settings.requests)
    cleanup.push_async_callback(client.close)
    shard = Shard(settings.shard, settings.shards)
    namespaces = shard.served(settings.namespaces)
    metrics.SHARDS.set(shard.count)
    cache = Cache()
    queue: WorkQueue[Key] = WorkQueue(settings.workers, share=lambda key: key.namespace)
    metrics.watch_queue_depth(lambda: queue.depth)
    leader = None
    if settings.leader_election:
        # a connection of its own: renewing must not wait behind the work that it protects
        own = await connect(2 if settings.shards > 1 else 1)
        cleanup.push_async_callback(own.close)
        leader = Leader(leases_of(settings, own))
        client.fence = leader.fence
    else:
        metrics.LEADER.set(1)
    poller = StatusPoller(settings.poll_seconds)
    cleanup.push_async_callback(poller.close)
    recorder = EventRecorder(client, settings.identity)
    controller = Controller(
        client=client,
        cache=cache,
        recorder=recorder,
        defaults=defaults,
        progress_seconds=settings.progress_seconds,
        enqueue=queue.add_unless_backing_off,
        goes_on=queue.sign_of_life,
        poller=poller,
        leader=leader,
        webhook=_webhook(settings, cleanup),
    )
    resync = Resync(client, cache, namespaces, settings.resync_seconds, queue.add_all, shard)
    child_watch = ChildWatch(client, cache, namespaces, settings.resync_seconds, queue.add)
    watches = framework.Watches(namespaces)
    return Operator(namespaces, watches, shard, cache, queue, controller, resync, child_watch, recorder, leader)


async def _run_parts(operator: Operator, stop: asyncio.Event) -> None:
    """Start everything, wait for `stop` or for a part's end, stop everything."""
    parts = {asyncio.create_task(operator.resync.run(), name="resync"),
             asyncio.create_task(_watch_children(operator), name="watches of children"),
             asyncio.create_task(operator.recorder.run(), name="event recorder"),
             asyncio.create_task(collect_all_every_hour(), name="garbage"),
             asyncio.create_task(measure_lag(), name="lag of the event loop")}  # fmt: skip
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    watchable = asyncio.create_task(_until_watchable(operator), name="first lists")
    try:
        # Nothing may be decided before both lists are there: a pod that is not known yet would be taken for one that
        # is lost.
        await asyncio.wait({stopping, watchable, *parts}, return_when=asyncio.FIRST_COMPLETED)
        if watchable.done() and not stop.is_set():
            if operator.leader is not None:  # one that could not act must not keep others from it
                election = operator.leader.run(
                    elected=operator.resync.start_over, deposed=operator.controller.stand_down
                )
                parts.add(asyncio.create_task(election, name="leader election"))
            operator.queue.start(operator.controller.reconcile)
            await _watch(operator, stopping, parts)
        _raise_from(parts)
    finally:
        await _wind_down(operator)
        for task in (*parts, stopping, watchable):
            task.cancel()
        await asyncio.gather(*parts, stopping, watchable, return_exceptions=True)
        if operator.leader is not None:
            await operator.leader.release()


async def _watch_children(operator: Operator) -> None:
    await operator.resync.first_done.wait()  # whose children they are
    await operator.child_watch.run()


async def _until_watchable(operator: Operator) -> None:
    await operator.resync.first_done.wait()
    await operator.child_watch.tried.wait()
    await framework.until_discoverable(operator.resync.client)


async def _watch(operator: Operator, stopping: asyncio.Task[Any], parts: set[asyncio.Task[None]]) -> None:
    """Run kopf until the signal comes or one of the parts ends.

    kopf cancels, when it ends, every task of the loop that began after it. So it is stopped last, after the work has
    been.
    """
    registry = kopf.OperatorRegistry()
    framework.register_login(registry, operator.resync.watch_from)
    watch.register(registry, operator.cache, operator.queue, operator.shard)
    namespaces = operator.namespaces
    before_kopf = asyncio.all_tasks()
    kopf_stop = asyncio.Event()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=framework.settings(),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        stop_flag=kopf_stop,
    )
    # kopf has put its own handlers in place of ours, and would stop at once
    stop_ours = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop_ours.set)
    signalled = asyncio.create_task(stop_ours.wait(), name="stop signal")
    framework_task = asyncio.create_task(kopf.run_tasks(tasks, ignored=before_kopf), name="kopf")
    watch_loss = asyncio.create_task(_until_a_watch_ends(operator), name="watch of the watches")
    try:
        await asyncio.wait(
            {framework_task, watch_loss, signalled, stopping, *parts}, return_when=asyncio.FIRST_COMPLETED
        )
        if watch_loss.done() or framework_task.done():
            ended = ", ".join(operator.watches.dead()) or "all of them"
            logger.error("watches have ended for good (%s); exiting, so that the kubelet restarts the operator", ended)
            raise WatchEnded(ended)
    finally:
        watch_loss.cancel()
        await _wind_down(operator)
        operator.watching = False
        kopf_stop.set()
        await asyncio.wait({framework_task, watch_loss}, timeout=FRAMEWORK_SECONDS)


async def _wind_down(operator: Operator) -> None:
    """No new look at a job, and what was begun is finished and what was recorded is posted. It may be called again."""
    await operator.queue.stop(within=PASS_SECONDS)
    await operator.recorder.drain(within=EVENT_SECONDS)
    await operator.controller.poller.close()  # kopf would wait 5 s for tasks of ours that began after it


async def _until_a_watch_ends(operator: Operator) -> None:
    """kopf tells neither when a watch begins nor, in time, when one ends; its other watches may then never end
    (1.45.2). A watch that never begins counts as one that has ended: the next process reads discovery anew."""
    try:
        async with asyncio.timeout(BEGIN_SECONDS):
            while operator.watches.dead():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        return
    operator.watching = True
    while not operator.watches.dead():  # noqa: ASYNC110
        await asyncio.sleep(1.0)


def _raise_from(parts: set[asyncio.Task[None]]) -> None:
    for task in parts:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


def main() -> int:
    """Entry point.

    Returns:
        0 after a graceful stop, 64 for a bad setting, 1 for anything else.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(configuration.usage())
        return 0
    try:
        settings = configuration.load()
        defaults = load_defaults(settings)
    except BadSetting as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)
        return configuration.EXIT_BAD_SETTING
    logs.configure(settings.log_level, settings.log_format)
    keep_collections_short()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = 1
            try:
                runner.run(run(settings, defaults))
                code = 0
            except BadSetting:
                code = configuration.EXIT_BAD_SETTING
                raise
            finally:
                _end_by_force_if_need_be(code)
    except BadSetting as error:
        logger.error("the operator stops: %s", error)
        return configuration.EXIT_BAD_SETTING
    except (ApiError, OSError) as error:
        logger.error("the operator stops: %s", error)
        return 1
    except WatchEnded:
        return 1
    except Exception:
        logger.exception("a part of the operator has died; exiting, so that the kubelet restarts it")
        return 1
    return 0


def _end_by_force_if_need_be(code: int) -> None:
    """Tasks of kopf whose watch has failed may ignore their cancellation for ever, and the loop would wait for them. On
    a busy machine the loop may take as long to end where nothing is wrong, so the exit code is that of the usual end.
    """
    last_resort = threading.Timer(LAST_SECONDS, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()


def _loop_factory() -> Any:
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
