"""A real API server for every test here, or a visible reason why not."""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.api_server.harness import OPERATOR, Cluster, Operator
from tests.api_server.server import START_SECONDS, ApiServer, api_server_running, as_kubeconfig
from tests.kubernetes import Impossible
from tests.support.tiers import cannot_run
from tests.trainer.forked import start as forked

from ddpjob_operator.cluster import paths

HERE = Path(__file__).parent
LOG_SHOWN = 20_000
"""Characters of a log, in the report of a test that failed."""
NAMESPACES = 30
"""That a shared operator has for the tests of several files: 8 watches in each."""
SERVER = pytest.StashKey[ApiServer | Impossible]()
SHARED = pytest.StashKey["Shared"]()
StartOperator = Callable[..., Awaitable[Operator]]
NewCluster = Callable[..., Awaitable[Cluster]]


def new_name() -> str:
    """Of a namespace."""
    return f"test-{uuid.uuid4().hex[:10]}"


@pytest.hookimpl(trylast=True)  # once it is known which test comes first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        item.add_marker(pytest.mark.api_server)
    for first in here[:1]:
        first.add_marker(pytest.mark.timeout(START_SECONDS + 300), append=False)  # before a timeout of its own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the operator that it shares has logged last."""
    report = yield
    operator = getattr(item, "funcargs", {}).get("operator")
    if report.failed and isinstance(operator, Operator) and operator.log.exists():
        report.sections.append(("log of the operator", operator.log.read_text(errors="replace")[-LOG_SHOWN:]))
    return report


def pytest_sessionfinish() -> None:
    forked.stop()


@pytest.fixture(scope="module")
def api_server(request: pytest.FixtureRequest) -> ApiServer:
    """An API server with our CRD."""
    # of the folder, not of the session: it takes a tenth of a core from whatever the same process tests afterwards
    folder = next(node for node in request.node.iter_parents() if node.path == HERE)
    if SERVER not in folder.stash:
        folder.stash[SERVER] = _started(folder)
    if isinstance(found := folder.stash[SERVER], Impossible):
        cannot_run("api", str(found))
    return found


def _started(folder: pytest.Collector) -> ApiServer | Impossible:
    running = ExitStack()
    try:
        server = running.enter_context(api_server_running())
    except Impossible as missing:
        return missing

    def stop() -> None:
        del folder.stash[SERVER]
        running.close()

    folder.addfinalizer(stop)
    return server


@pytest.fixture
async def new_cluster(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewCluster]:
    """Makes namespaces, each seen through a client of its own, and deletes them at the end from a server that stays."""
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))
    made: list[Cluster] = []

    async def make(existing: str | None = None) -> Cluster:
        found = await Cluster.connect(api_server.kubeconfig, existing or new_name())
        made.append(found)
        if existing is None:
            await found.create_namespace()
        return found

    yield make
    for found in made:
        if not api_server.ours:
            await found.delete_namespace()
        await found.client.close()


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, new_cluster: NewCluster) -> AsyncIterator[Cluster]:
    """The API server and a namespace of the test's own: with `operator`, one of those that it serves."""
    if "operator" not in request.fixturenames:
        yield await new_cluster()
        return
    served = request.getfixturevalue("served_namespace")
    cluster = await new_cluster(served)
    yield cluster
    # the operator goes on to serve it, and trainers of the next test answer at the same address
    await cluster.client.delete(paths.jobs(served), "ddpjobs")


@pytest.fixture
async def start_operator(cluster: Cluster, tmp_path: Path) -> AsyncIterator[StartOperator]:
    async with operators_of(cluster, tmp_path) as start:
        yield start


@asynccontextmanager
async def operators_of(cluster: Cluster, folder: Path) -> AsyncIterator[StartOperator]:
    """Starts operators for the cluster's namespace, and ends those that still run. Their logs are in the folder."""
    started: list[Operator] = []

    async def start(
        kubeconfig: Path | None = None, *, ready: bool = True, command: tuple[str, ...] = OPERATOR, **environment: Any
    ) -> Operator:
        given = {name: str(value) for name, value in environment.items()}
        log = folder / f"operator-{len(started)}.log"
        operator = Operator(cluster.namespace, kubeconfig or cluster.kubeconfig, log, given, command, forked=True)
        await operator.start()
        started.append(operator)
        return await operator.ready() if ready else operator

    try:
        yield start
    finally:
        for operator in started:
            await operator.kill()


@dataclass(eq=False)
class Shared:
    """An operator for the tests of the folder, each of which gets one of the namespaces that it serves."""

    operator: Operator
    process: subprocess.Popen[bytes]
    free: list[str]


@pytest.fixture(scope="module")
def shared_operator(
    request: pytest.FixtureRequest, api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Shared:
    """To start one takes as long as a test, so those that only need some operator have it in common: those of one file
    at least. It watches each of its namespaces, so it has not those of all tests.
    """
    folder = next(node for node in request.node.iter_parents() if node.path == HERE)
    needed = sum(item.path == request.node.path for item in _with_operator(request.session))
    if SHARED not in folder.stash or len(folder.stash[SHARED].free) < needed:
        _stop_shared(folder)
        names = [new_name() for _ in range(max(needed, NAMESPACES))]
        log = tmp_path_factory.mktemp("operator") / "operator.log"
        folder.stash[SHARED] = _shared(names, api_server, log)
        folder.addfinalizer(lambda: _stop_shared(folder))
    return folder.stash[SHARED]


def _with_operator(session: pytest.Session) -> list[pytest.Item]:
    here = [item for item in session.items if item.path.is_relative_to(HERE)]
    return [item for item in here if "operator" in getattr(item, "fixturenames", ())]


def _stop_shared(folder: pytest.Item | pytest.Collector) -> None:
    if (shared := folder.stash.get(SHARED, None)) is not None:
        del folder.stash[SHARED]
        shared.process.kill()
        shared.process.wait()


def _shared(names: list[str], api_server: ApiServer, log: Path) -> Shared:
    # its Lease is in the first one, which no test gets: it must not go with the namespace that a test deletes
    served = [new_name(), *names]
    operator = Operator(",".join(served), api_server.kubeconfig, log)

    async def prepare() -> subprocess.Popen[bytes]:
        found = await Cluster.connect(api_server.kubeconfig, served[0])
        await asyncio.gather(*(replace(found, namespace=name).create_namespace() for name in served))
        await found.client.close()
        process = operator.start_without_a_loop()
        try:
            await operator.ready()
        except BaseException:
            process.kill()
            raise
        return process

    with as_kubeconfig(api_server.kubeconfig), ThreadPoolExecutor(1) as aside:
        process = aside.submit(asyncio.run, prepare()).result()
    return Shared(operator, process, names)


@pytest.fixture
def served_namespace(shared_operator: Shared) -> str:
    """The one of this test."""
    return shared_operator.free.pop()


@pytest.fixture
def operator(served_namespace: str, shared_operator: Shared) -> Operator:
    """One operator that is ready. A test that changes or ends it starts its own instead."""
    log = shared_operator.operator.log
    assert shared_operator.process.poll() is None, f"the operator has ended:\n{log.read_text()[-4000:]}"
    return shared_operator.operator


@pytest.fixture
async def trainer() -> object:
    """Node rank 0's port 9400, on an address of its own."""
    answers: list[str] = []

    async def status(request: web.Request) -> web.Response:
        return web.Response(text=answers[-1], content_type="application/json")

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    ip = "127.94.0.1"
    await web.TCPSite(runner, ip, 9400).start()
    yield ip, answers
    await runner.cleanup()
