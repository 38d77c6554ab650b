"""A real API server for every test here, or a visible reason why not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.api_server.harness import Cluster, Operator
from tests.api_server.server import START_SECONDS, ApiServer, api_server_running
from tests.kubernetes import Impossible, cannot_run

HERE = Path(__file__).parent
SERVER = pytest.StashKey[ApiServer | Impossible]()
StartOperator = Callable[..., Awaitable[Operator]]
NewCluster = Callable[[], Awaitable[Cluster]]


@pytest.hookimpl(trylast=True)  # once it is known which test comes first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        item.add_marker(pytest.mark.api_server)
    for first in here[:1]:
        first.add_marker(pytest.mark.timeout(START_SECONDS + 300))


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

    async def make() -> Cluster:
        found = await Cluster.connect(api_server.kubeconfig, f"test-{uuid.uuid4().hex[:10]}")
        made.append(found)
        await found.create_namespace()
        return found

    yield make
    for found in made:
        if not api_server.ours:
            await found.delete_namespace()
        await found.client.close()


@pytest.fixture
async def cluster(new_cluster: NewCluster) -> Cluster:
    """The API server and a namespace of the test's own."""
    return await new_cluster()


@pytest.fixture
async def start_operator(cluster: Cluster, tmp_path: Path) -> AsyncIterator[StartOperator]:
    """Starts operators for the test's namespace, and ends those that still run."""
    started: list[Operator] = []

    async def start(kubeconfig: Path | None = None, *, ready: bool = True, **environment: Any) -> Operator:
        given = {name: str(value) for name, value in environment.items()}
        log = tmp_path / f"operator-{len(started)}.log"
        operator = await Operator(cluster.namespace, kubeconfig or cluster.kubeconfig, log, given).start()
        started.append(operator)
        return await operator.ready() if ready else operator

    yield start
    for operator in started:
        await operator.kill()


@pytest.fixture
async def operator(start_operator: StartOperator) -> Operator:
    """One operator that is ready."""
    return await start_operator()


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
