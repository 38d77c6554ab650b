"""Serve the pages of `ddpjob dashboard` until Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import REFUSED, SUCCEEDED
from ddpjob_operator.home import expanded
from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.links import LinkTemplate
from ddpjob_operator.page.server import serve
from ddpjob_operator.page.values import Source
from ddpjob_operator.page.volumes import Volumes
from ddpjob_operator.runtime.client import Client


def show_folder(shared: Path, address: str, port: int, links: Sequence[LinkTemplate] = ()) -> int:
    """Until Ctrl-C; the exit code."""
    if not expanded(shared).is_dir():
        print(f"error: --shared {shared}: no such folder; name the one that ddpjob run uses", file=sys.stderr)
        return REFUSED
    try:
        return asyncio.run(_until_interrupted(FolderSource.at(shared), address, port, links))
    except KeyboardInterrupt:
        return SUCCEEDED


def show_cluster(
    cluster: Cluster,
    everywhere: bool,
    address: str,
    port: int,
    links: Sequence[LinkTemplate] = (),
    volumes: Volumes | None = None,
) -> int:
    """With volumes of its jobs, if they are mounted here. Until Ctrl-C; the exit code."""

    async def ask(client: Client, namespace: str) -> int:
        source = ClusterSource(client, None if everywhere else namespace, cluster.context, volumes)
        return await _until_interrupted(source, address, port, links)

    code = asked(cluster, ask)
    return SUCCEEDED if code == 130 else code


async def _until_interrupted(source: Source, address: str, port: int, links: Sequence[LinkTemplate]) -> int:
    try:
        runner, url = await serve(source, address, port, links)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"error: --port {port} on {address}: {reason}; name another one, or --port 0", file=sys.stderr)
        return REFUSED
    # what was imported stays: garbage collection need not look at it while a long list of jobs is parsed
    gc.freeze()
    print(f"{url} shows the jobs of {source.where}; Ctrl-C ends it", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
    return SUCCEEDED
