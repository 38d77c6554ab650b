"""What the operator relies on in kopf beyond its documentation; docs/decisions/0009-kopf.md says where.

kopf runs here with the operator's own settings and login, against a server in this process that speaks just enough of
the Kubernetes API. Each test has a loop of its own: kopf cancels other tasks of its loop when it ends.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ddpjob_operator import metrics
from ddpjob_operator.api import GROUP, PLURAL, VERSION
from ddpjob_operator.watching import framework

DEADLINE = 120.0
JOBS = f"watcher for {PLURAL}.{VERSION}.{GROUP}@None"
PODS = "watcher for pods.v1@None"

Object = dict[str, Any]


def job(name: str, **metadata: Any) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DDPJob",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", **metadata},
    }


@dataclass
class Api:
    """An API server with DDPJobs and pods. Lists of DDPJobs are answered from `lists`, the last one again and again."""

    lists: list[list[Object] | int] = field(default_factory=lambda: [[]])
    """Objects, or the status of an error."""
    watched: asyncio.Queue[Object] = field(default_factory=asyncio.Queue)
    """Events of the watch of DDPJobs."""
    requests: list[str] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    """Of requests about DDPJobs."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, event: Object) -> None:
        """Let the watch of DDPJobs send an event."""
        self.loop.call_soon_threadsafe(self.watched.put_nowait, event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One request, as the API server would answer it."""
        self.requests.append(f"{request.method} {request.path}")
        match request.path.strip("/").split("/"):
            case ["api"]:
                return web.json_response({"versions": ["v1"]})
            case ["apis"]:
                version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
                group = {"name": GROUP, "versions": [version], "preferredVersion": version}
                return web.json_response({"groups": [group]})
            case ["api", "v1"]:
                return web.json_response(
                    {"resources": [_resource("pods", "Pod"), _resource("namespaces", "Namespace")]}
                )
            case ["apis", _, _]:
                return web.json_response({"resources": [_resource(PLURAL, "DDPJob")]})
        ours = request.path.endswith(PLURAL)
        if ours:
            self.queries.append(dict(request.query))
        if "watch" in request.query:
            return await self._stream(request, self.watched if ours else asyncio.Queue())
        found = self.lists.pop(0) if ours and len(self.lists) > 1 else self.lists[0] if ours else []
        if isinstance(found, int):
            return web.json_response({"kind": "Status", "code": found, "message": "refused"}, status=found)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": found})

    async def _stream(self, request: web.Request, events: asyncio.Queue[Object]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            event = await events.get()
            await response.write(json.dumps(event).encode() + b"\n")


def _resource(plural: str, kind: str) -> Object:
    return {
        "name": plural,
        "singularName": kind.lower(),
        "namespaced": True,
        "kind": kind,
        "verbs": ["list", "watch", "patch"],
    }


class Short:
    """Endless backoffs, as the operator's, and short ones."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield 0.01


def watches() -> set[str]:
    """Names of the tasks that watch."""
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watcher for ")}


@contextmanager
def serving(api: Api) -> Iterator[int]:
    """The port on which the API is served until the end of the block.

    From a thread: when it ends, kopf waits 5 s for tasks of its loop that are not its own.
    """
    port: Future[int] = Future()

    async def serve() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", api.answer)
        runner = web.AppRunner(application, shutdown_timeout=0, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.set_result(runner.addresses[0][1])
        await api.closed.wait()
        for connection in asyncio.all_tasks() - {asyncio.current_task()}:
            connection.cancel()  # those that stream would wait for their next event
        await runner.cleanup()

    thread = threading.Thread(target=api.loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        yield port.result(DEADLINE)
    finally:
        api.loop.call_soon_threadsafe(api.closed.set)
        thread.join()
        api.loop.close()


@asynccontextmanager
async def kopf_running(
    registry: kopf.OperatorRegistry, namespaces: tuple[str, ...], backoffs: Any
) -> AsyncIterator[None]:
    """kopf as main.py runs it, with waits that a test can afford."""
    settings = framework.settings()
    settings.networking.error_backoffs = backoffs
    settings.queueing.exit_timeout = settings.queueing.idle_timeout = 0.1
    settings.process.ultimate_exiting_timeout = None  # it would kill the tests
    before = asyncio.all_tasks()
    stop = asyncio.Event()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=settings,
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        stop_flag=stop,
    )
    task = asyncio.create_task(kopf.run_tasks(tasks, ignored=before))
    try:
        yield
    finally:
        # kopf leaves the other watches running when one has died, and then waits for them
        await ended({task for task in asyncio.all_tasks() if task.get_name() in watches()})
        stop.set()
        await asyncio.wait({task}, timeout=DEADLINE)
        await ended(asyncio.all_tasks() - before)


async def ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel them until they end: a watch that is cancelled in the moment of a timeout of its own goes on."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=1.0)


def under_kopf(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[Api], Awaitable[None]],
    *,
    api: Callable[[], Api] = Api,
    handler: Callable[..., Awaitable[None]] | None = None,
    namespaces: tuple[str, ...] = (),
    backoffs: Any = (),
    watch_from: framework.WatchFrom | None = None,
) -> None:
    """Run `check` beside kopf, which calls `handler` for events of DDPJobs and nothing for those of pods."""

    served = api()

    async def main() -> None:
        registry = kopf.OperatorRegistry()
        framework.register_login(registry, watch_from)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(handler or _nothing)
        kopf.on.event("", "v1", "pods", registry=registry)(_nothing)
        async with kopf_running(registry, namespaces, backoffs):
            await check(served)

    with serving(served) as port:
        monkeypatch.setenv("KUBECONFIG", str(_kubeconfig(tmp_path, port)))
        asyncio.run(main())


async def _nothing(**_: Any) -> None:
    pass


def _kubeconfig(folder: Path, port: int) -> Path:
    file = folder / "kubeconfig"
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "us"}}
    user = {"name": "us", "user": {"token": "t"}}
    file.write_text(
        yaml.safe_dump({"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "here"})
    )
    return file


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE:g} s: {what}") from None


@pytest.mark.parametrize("namespaces", [(), ("research", "students")], ids=["cluster", "namespaces"])
def test_each_watch_is_a_task_of_the_name_that_liveness_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: tuple[str, ...]
) -> None:
    async def check(api: Api) -> None:
        found = framework.Watches(namespaces)
        await until(lambda: not found.dead(), "all watches are there")
        assert watches() == framework.expected_watches(namespaces)

    under_kopf(tmp_path, monkeypatch, check, namespaces=namespaces)


@pytest.mark.parametrize(
    ("status", "backoffs"),
    [
        pytest.param(500, (0.01, 0.01), id="the backoffs run out"),
        pytest.param(404, Short(), id="404, whatever the backoffs"),
    ],
)
def test_a_watch_that_cannot_list_ends_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, backoffs: Any
) -> None:
    """Hence endless backoffs, and the probe that looks for the task."""

    async def check(api: Api) -> None:
        await until(lambda: watches() == {PODS}, "the watch of jobs has ended, and that of pods has not")
        assert framework.Watches(()).dead() == [JOBS]

    under_kopf(tmp_path, monkeypatch, check, api=lambda: Api(lists=[status]), backoffs=backoffs)


def test_the_backoffs_of_the_operator_are_endless_for_each_request() -> None:
    backoffs = framework.settings().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    assert [len(list(islice(backoffs, 1000))) for _ in range(2)] == [1000, 1000]


def test_a_watch_survives_any_number_of_errors_where_the_backoffs_are_endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def handler(name: str, **_: Any) -> None:
        seen.append(name)

    async def check(api: Api) -> None:
        await until(lambda: seen == ["a"], "the job is seen after 40 errors")
        assert api.lists == [[job("a")]]

    refused: list[list[Object] | int] = [500, 503] * 20
    under_kopf(
        tmp_path, monkeypatch, check, api=lambda: Api(lists=[*refused, [job("a")]]), handler=handler, backoffs=Short()
    )


def test_credentials_that_stay_refused_are_read_again_after_growing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf logs in at once after each 401, and tries again with a new connection, as fast as the server answers."""

    async def check(api: Api) -> None:
        began = time.monotonic()
        await until(lambda: len(api.queries) >= 2, "it is refused, and logs in again")
        await asyncio.sleep(1.0)
        # of those that it waits for, on a busy machine too: kopf alone asks hundreds of times a second
        assert len(api.queries) <= 6 * max(1.0, time.monotonic() - began)
        assert watches() == {JOBS, PODS}, "they go on once the credentials are good"

    under_kopf(tmp_path, monkeypatch, check, api=lambda: Api(lists=[401]), backoffs=Short())


@pytest.mark.fault(4, 9)
@pytest.mark.parametrize(("code", "survives"), [(410, True), (500, False)])
def test_an_error_in_the_stream_ends_a_watch_unless_it_is_410(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, survives: bool
) -> None:
    def lists(api: Api) -> int:
        return api.requests.count(f"GET /apis/{GROUP}/{VERSION}/{PLURAL}")

    async def check(api: Api) -> None:
        await until(lambda: watches() == {JOBS, PODS}, "both watch")
        before = lists(api)
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": code}})
        if survives:
            await until(lambda: lists(api) >= before + 2, "the jobs are listed and watched again")
            assert watches() == {JOBS, PODS}
        else:
            await until(lambda: watches() == {PODS}, "the watch of jobs has ended")

    under_kopf(tmp_path, monkeypatch, check, backoffs=Short())


@pytest.mark.fault(8)
def test_a_watch_that_falls_silent_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 70 s in the operator; the server of a watch that lives sends a bookmark every minute."""
    chosen = framework.settings()
    assert chosen.watching.inactivity_timeout == 70
    chosen.watching.inactivity_timeout = 0.3
    monkeypatch.setattr(framework, "settings", lambda: chosen)

    async def check(api: Api) -> None:
        await until(lambda: watches() == {JOBS, PODS}, "both watch")
        begun = len(api.requests)
        await until(lambda: len(api.requests) >= begun + 4, "both are begun anew, twice")
        # a watch that is cancelled in the moment of its timeout may go on
        chosen.watching.inactivity_timeout = 70
        begun = len(api.requests)
        await until(lambda: len(api.requests) >= begun + 2, "both have the longer timeout")
        assert watches() == {JOBS, PODS}

    under_kopf(tmp_path, monkeypatch, check, backoffs=Short())


@pytest.mark.parametrize(
    ("path", "watched"),
    [
        ("/api/v1/pods", ("pods", "")),
        ("/api/v1/namespaces/a/pods", ("pods", "a")),
        (f"/proxy/apis/{GROUP}/{VERSION}/namespaces/a/{PLURAL}", (PLURAL, "a")),
    ],
)
async def test_a_watch_is_counted_for_its_namespace(path: str, watched: tuple[str, str]) -> None:
    """Of several, one that has stopped would be hidden by the others."""
    counter = metrics.WATCH_STARTS.labels(*watched)
    before = counter._value.get()
    begun = aiohttp.TraceRequestStartParams("GET", URL(f"https://api{path}?watch=true"), CIMultiDict())
    await framework._counting().on_request_start[0](None, None, begun)  # type: ignore[arg-type]
    assert counter._value.get() == before + 1


def test_what_an_event_handler_raises_is_logged_and_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hence our own queue, with retries. kopf keeps the order of an object's events, so that a retry of the first
    would come before the second; a later one would be a patch, in which kopf keeps the state of its handlers."""
    seen: list[str] = []

    async def handler(meta: Any, **_: Any) -> None:
        seen.append(meta["resourceVersion"])
        raise RuntimeError(f"cannot handle {meta['resourceVersion']}")

    async def check(api: Api) -> None:
        for version in ("1", "2"):
            api.send({"type": "MODIFIED", "object": job("a", resourceVersion=version)})
            await until(lambda version=version: version in seen, f"version {version} is seen")
        assert seen == ["1", "2"]
        assert not [request for request in api.requests if not request.startswith("GET ")]

    under_kopf(tmp_path, monkeypatch, check, handler=handler)
    assert "cannot handle 1" in caplog.text


def test_an_object_that_a_later_list_lacks_is_not_announced_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hence our own resync."""
    seen: list[tuple[str | None, str]] = []

    async def handler(event: Any, name: str, **_: Any) -> None:
        seen.append((event["type"], name))

    async def check(api: Api) -> None:
        await until(lambda: len(seen) == 1, "the first list is seen")
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
        await until(lambda: len(seen) == 2, "the second list is seen")
        assert seen == [(None, "deleted meanwhile"), (None, "b")]

    under_kopf(
        tmp_path,
        monkeypatch,
        check,
        api=lambda: Api(lists=[[job("deleted meanwhile")], [job("b")]]),
        handler=handler,
    )


def test_lists_of_kopf_are_of_one_object_which_is_dropped_and_watches_begin_where_ours_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All objects of a large cluster would be in memory at once."""
    seen: list[tuple[str | None, str]] = []
    versions = iter((41, None))

    async def handler(event: Any, name: str, **_: Any) -> None:
        seen.append((event["type"], name))

    async def check(api: Api) -> None:
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
        await until(lambda: len(api.queries) == 4, "it watches again")
        assert seen == []
        first, watch, second, again = api.queries
        assert first.get("limit") == second.get("limit") == "1"
        assert (watch["resourceVersion"], again["resourceVersion"]) == ("41", "1")

    under_kopf(
        tmp_path,
        monkeypatch,
        check,
        api=lambda: Api(lists=[[job("a")]]),
        handler=handler,
        watch_from=lambda path: next(versions) if path.endswith(PLURAL) else None,
    )
