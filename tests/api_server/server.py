"""The API server itself: found or started, with our CRD, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from tests.api_server.harness import REPOSITORY
from tests.kubernetes import cluster_running
from tests.support.waiting import eventually_async

from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError

CRD = REPOSITORY / "manifests" / "crd" / "ddpjobs.training.ddpjob.io.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
START_SECONDS = 1800
"""The first start on a machine builds Kubernetes."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """One that answers, and has our CRD."""

    kubeconfig: Path
    ours: bool
    """Whether it goes at the end of the block, and with it all that was made in it."""


@contextmanager
def api_server_running() -> Iterator[ApiServer]:
    """The one that DDPJOB_TEST_KUBECONFIG names, the one that runs here, or one that is started for the block alone.

    Raises Impossible where none is to be had.
    """
    with cluster_running("--control-plane-only") as (kubeconfig, ours):
        asyncio.run(install_crd(kubeconfig, yaml.safe_load(CRD.read_text())))
        yield ApiServer(kubeconfig, ours)


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

        await eventually_async(established, f"{name} is established")


async def remove_crd(kubeconfig: Path, manifest: dict[str, Any]) -> None:
    """Delete a CustomResourceDefinition and all its objects."""
    async with _logged_in(kubeconfig) as client:
        await client.delete(f"{CRDS}/{manifest['metadata']['name']}", "customresourcedefinitions")


@contextmanager
def as_kubeconfig(path: Path) -> Iterator[None]:
    """KUBECONFIG names it until the end of the block."""
    with patch.dict(os.environ, {"KUBECONFIG": str(path)}):
        yield


@asynccontextmanager
async def _logged_in(kubeconfig: Path) -> AsyncIterator[Client]:
    with as_kubeconfig(kubeconfig):
        client = await connect()
    try:
        yield client
    finally:
        await client.close()
