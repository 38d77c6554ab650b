"""The API server itself: found or started, with our CRD, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from tests.api_server.harness import REPOSITORY, eventually

from ddpjob_operator.cluster.client import Client, connect
from ddpjob_operator.cluster.errors import ApiError

SCRIPT = REPOSITORY / "tests" / "cluster" / "cluster.sh"
CRD = REPOSITORY / "manifests" / "crd" / "ddpjobs.training.ddpjob.io.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
START_SECONDS = 1800
"""The first start on a machine builds Kubernetes."""


class Impossible(Exception):
    """No API server can be had on this machine; the message says what is missing."""


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
    given = os.environ.get("DDPJOB_TEST_KUBECONFIG")
    ours = given is None and subprocess.run(_script("status"), capture_output=True).returncode != 0
    if given is None:
        up = subprocess.run(_script("up"), capture_output=True, text=True, timeout=START_SECONDS)
        if up.returncode == 3:
            raise Impossible(f"no API server: {up.stderr.strip().splitlines()[-1]}")
        assert up.returncode == 0, f"the API server did not start:\n{up.stderr}"
        given = up.stdout.strip().removeprefix("KUBECONFIG=")
    try:
        kubeconfig = Path(given)
        asyncio.run(install_crd(kubeconfig, yaml.safe_load(CRD.read_text())))
        yield ApiServer(kubeconfig, ours)
    finally:
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
