"""A real API server for every test here, or a visible reason why not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api_server.harness import REPOSITORY, Cluster, Operator, eventually

from ddpjob_operator.cluster.client import Client, connect
from ddpjob_operator.cluster.errors import ApiError

SCRIPT = REPOSITORY / "tests" / "cluster" / "cluster.sh"
CRD = REPOSITORY / "manifests" / "crd" / "ddpjobs.training.ddpjob.io.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
START_SECONDS = 1800
"""The first start on a machine builds Kubernetes."""

StartOperator = Callable[..., Awaitable[Operator]]
NewCluster = Callable[[], Awaitable[Cluster]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.api_server)
    for first in here[:1]:
        first.add_marker(pytest.mark.timeout(START_SECONDS))


@pytest.fixture(scope="session")
def api_server() -> Iterator[Path]:
    """The kubeconfig of an API server with our CRD: what DDPJOB_TEST_KUBECONFIG names, or one that is started here."""
    given = os.environ.get("DDPJOB_TEST_KUBECONFIG")
    ours = given is None and subprocess.run(_script("status"), capture_output=True).returncode != 0
    if given is None:
        up = subprocess.run(_script("up"), capture_output=True, text=True, timeout=START_SECONDS)
        if up.returncode == 3:
            pytest.skip(f"no API server: {up.stderr.strip().splitlines()[-1]}")
        assert up.returncode == 0, f"the API server did not start:\n{up.stderr}"
        given = up.stdout.strip().removeprefix("KUBECONFIG=")
    kubeconfig = Path(given)
    asyncio.run(install_crd(kubeconfig, yaml.safe_load(CRD.read_text())))
    yield kubeconfig
    if ours:
        subprocess.run(_script("down"), capture_output=True, check=True)


def _script(command: str) -> list[str]:
    return ["bash", str(SCRIPT), command, "--control-plane-only"]


async def install_crd(kubeconfig: Path, manifest: dict[str, Any]) -> None:
    """Create or update a CustomResourceDefinition, and wait until it is served."""
    async with _logged_in(kubeconfig) as client:
        name = manifest["metadata"]["name"]
        try:
            await client.create(CRDS, "customresourcedefinitions", manifest)
        except ApiError as error:
            if not error.already_exists:
                raise
            await client.merge_patch(f"{CRDS}/{name}", "customresourcedefinitions", {"spec": manifest["spec"]})

        async def established() -> bool:
            found = await client.get(f"{CRDS}/{name}", "customresourcedefinitions")
            conditions = (found.get("status") or {}).get("conditions") or []
            return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)

        await eventually(established, f"{name} is established")


async def remove_crd(kubeconfig: Path, manifest: dict[str, Any]) -> None:
    """Delete a CustomResourceDefinition and all its objects."""
    async with _logged_in(kubeconfig) as client:
        await client.delete(f"{CRDS}/{manifest['metadata']['name']}", "customresourcedefinitions")


@asynccontextmanager
async def _logged_in(kubeconfig: Path) -> AsyncIterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        client = await connect()
    yield client
    await client.close()


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
