"""A real API server for every test here, or a visible reason why not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api_server.harness import Cluster, Operator
from tests.api_server.server import START_SECONDS, Impossible, api_server_running

StartOperator = Callable[..., Awaitable[Operator]]
NewCluster = Callable[[], Awaitable[Cluster]]


@pytest.hookimpl(trylast=True)  # once it is known which test comes first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.api_server)
    for first in here[:1]:
        first.add_marker(pytest.mark.timeout(START_SECONDS + 300))


@pytest.fixture(scope="session")
def api_server() -> Iterator[Path]:
    """The kubeconfig of an API server with our CRD; skips where none is to be had."""
    try:
        with api_server_running() as kubeconfig:
            yield kubeconfig
    except Impossible as missing:
        pytest.skip(str(missing))


@pytest.fixture
async def new_cluster(api_server: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewCluster]:
    """Makes namespaces, each seen through a client of its own, and deletes them at the end."""
    monkeypatch.setenv("KUBECONFIG", str(api_server))
    made: list[Cluster] = []

    async def make() -> Cluster:
        found = await Cluster.connect(api_server, f"test-{uuid.uuid4().hex[:10]}")
        made.append(found)
        await found.create_namespace()
        return found

    yield make
    for found in made:
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
