"""The same without asyncio: an event loop in a thread of its own, so that it works where one runs already, as in a
notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cache
from html import escape
from typing import Any, Self, TypeVar

from ddpjob.handle import AsyncJob
from ddpjob.notebook import display_here
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.follow.lines import Line
from ddpjob_operator.follow.volume_snapshots import Snapshot
from ddpjob_operator.follow.why import Answer
from ddpjob_operator.local.display import Display
from ddpjob_operator.local.observed import RunView

T = TypeVar("T")

_SECONDS_TO_CLEAN_UP = 15.0
"""A request's deadline."""
_SECONDS_TO_CLOSE = 2.0

_open: set[AsyncJob] = set()
"""Those of each `Job` that somebody still holds."""
_closing: set[Future[None]] = set()


class Job:
    """A job on a cluster. Everything waits for the cluster's answer. `close` closes the connection, and so does letting
    go of the job.
    """

    def __init__(self, job: AsyncJob) -> None:
        self._job = job
        _open.add(job)
        weakref.finalize(self, _let_go, job).atexit = False

    @classmethod
    def get(cls, name: str, *, namespace: str | None = None, context: str | None = None) -> Job:
        """A job that is there.

        Raises:
            ApiError: there is none, or the cluster refused.
        """
        return cls(run(AsyncJob.get(name, namespace=namespace, context=context)))

    @property
    def name(self) -> str:
        return self._job.name

    @property
    def namespace(self) -> str:
        return self._job.namespace

    @property
    def status(self) -> DDPJobStatus:
        return run(self._job.status())

    def snapshots(self, *, image: str | None = None) -> tuple[Snapshot, ...]:
        """All that its volume has, which a short-lived pod reads: the newest first, then checkpoints of the program's
        own, then what a restore has set aside. `image` is that of the pod, by default that of the job.

        `status.snapshot` is the newest one on record, without a pod.

        Raises:
            ApiError: there is no such job, the pod may not be made or did not start within three minutes, or its image
                is older than this.
        """
        return run(self._job.snapshots(image=image))

    def why(self) -> Answer:
        """Why it is where it is; `headline` says it in one line, `text()` with the evidence."""
        return run(self._job.why())

    def wait(self, seconds: float | None = None) -> DDPJobStatus:
        """Wait until it has succeeded.

        Raises:
            JobFailed: it has failed.
            TimeoutError: it has not ended within these seconds.
            ApiError: it was deleted, the cluster refused, or gave no answer for five minutes.
        """
        return run(self._job.wait(seconds))

    def watch(self) -> DDPJobStatus:
        """Show it until it has ended: in a notebook as an output that is replaced, on a terminal as a live view. The
        status that it ended with, also of a failure. Ctrl-C ends the watching; the job goes on.

        Raises:
            ApiError: it was deleted, the cluster refused, or gave no answer for five minutes.
        """
        calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        with display_here() as display:
            watching = asyncio.run_coroutine_threadsafe(self._job.watch(_FromThread(display, calls.put)), _loop())
            watching.add_done_callback(lambda _: calls.put(None))
            try:
                while (call := calls.get()) is not None:
                    call()
            finally:
                watching.cancel()
            return watching.result()

    def logs(
        self,
        *,
        follow: bool = True,
        rank: int | None = None,
        node: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        since: timedelta | None = None,
        grep: str | None = None,
        claim: str | None = None,
        image: str | None = None,
    ) -> Iterator[Line]:
        """What the ranks print: with `follow` as it comes, over all attempts until the job has ended.

        `rank` or `node`, a node rank, chooses whose lines; `attempt` is the newest by default. Of the lines of each pod
        that match `grep`, `tail` leaves the last so many, and `since` those of so long ago and newer.

        Once the pods are gone, and once the DDPJob is, a short-lived pod reads the newest attempt from the volume, and
        is deleted when the iterator ends or is closed; its lines have no time stamp. `claim` names the claim of a job
        that is gone, by default the operator's, and `image` the image of that pod, by default that of the job.

        Raises:
            ApiError: there is no such job, its volume is gone or has no such log, the pod that reads it did not start
                within three minutes, or the cluster refused.
            ValueError: `rank` and `node` are both given, or a number is less than 0.
        """
        lines = self._job.logs(
            follow=follow,
            rank=rank,
            node=node,
            attempt=attempt,
            tail=tail,
            since=since,
            grep=grep,
            claim=claim,
            image=image,
        )
        try:
            while True:
                try:
                    yield run(_next(lines))
                except StopAsyncIteration:
                    return
        finally:
            run(lines.aclose())

    def suspend(self) -> None:
        """Its pods save a snapshot and end; `unsuspend` resumes from it."""
        run(self._job.suspend())

    def unsuspend(self) -> None:
        run(self._job.unsuspend())

    def scale(self, nodes: int) -> None:
        """Give an elastic job another number of nodes."""
        run(self._job.scale(nodes))

    def cancel(self) -> None:
        """Delete it: its pods save a snapshot and end. Its volume is kept, unless shared.retain is false."""
        run(self._job.cancel())

    def close(self) -> None:
        """Close the connection; the job goes on."""
        run(self._job.close())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Job({self.name!r}, namespace={self.namespace!r})"

    def _repr_html_(self) -> str:
        """In a notebook: phase, progress and why, as of now."""
        status, answer = self.status, self.why()
        shown = status.summary
        rows = {
            "phase": str(status.phase or "new"),
            "progress": (shown.progress if shown else None) or "",
            "nodes": (shown.nodes if shown else None) or "",
            "restarts": str(status.restarts),
        }
        cells = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in rows.items() if value)
        return f"<p>{escape(answer.headline)}</p><table>{cells}</table>"


class _FromThread:
    """A display in another thread: a notebook shows what the thread of its cell shows."""

    def __init__(self, display: Display, call: Callable[[Callable[[], None]], None]) -> None:
        self._display = display
        self._call = call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        return None

    def show(self, view: RunView) -> None:
        self._call(lambda: self._display.show(view))

    def event(self, event: Event) -> None:
        self._call(lambda: self._display.event(event))

    def write_line(self, line: str) -> None:
        self._call(lambda: self._display.write_line(line))

    def output(self, line: str) -> None:
        self._call(lambda: self._display.output(line))


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs in the loop of the thread. Ctrl-C ends it, and waits for its end: it may have
    a pod to delete."""
    ended = threading.Event()

    async def until_ended() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(until_ended(), _loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(_SECONDS_TO_CLEAN_UP)
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ddpjob", daemon=True).start()
    return loop


async def _next(lines: Any) -> Line:
    found: Line = await anext(lines)
    return found


def _let_go(job: AsyncJob) -> None:
    """Close the connection of a job that nobody holds any more: aiohttp reports one that is open as an error. This runs
    in any thread, that of the loop too, so it does not wait.
    """
    _open.discard(job)
    closing = asyncio.run_coroutine_threadsafe(job.close(), _loop())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


@atexit.register
def _let_all_go() -> None:
    """At the end of the program, while the thread of the loop still runs."""
    for job in list(_open):
        _let_go(job)
    wait(list(_closing), timeout=_SECONDS_TO_CLOSE)
