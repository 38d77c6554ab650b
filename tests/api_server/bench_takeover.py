"""How long nobody acts when the leading operator goes: from its end until the standby has made a job's pods.

    python -m tests.api_server.bench_takeover [--rounds 5]

Two operators with a real Lease on a real API server. A crash is SIGKILL; a graceful end is SIGTERM, and begins with
that. The job is created once the leader's process has ended, so whoever makes its pods is the standby; what that had to
start itself is behind it by then, as on a cluster with two replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.api_server.harness import Cluster, Operator
from tests.api_server.server import ApiServer, api_server_running, as_kubeconfig
from tests.kubernetes import Impossible

TARGETS = {"a crash": 17.0, "a graceful end": 2.0}


async def takeover(cluster: Cluster, crash: bool, logs: Path) -> float:
    """Seconds from the leader's end to the first gang that the standby has made."""
    async with AsyncExitStack() as stack:
        leader, _ = [await _operator(cluster, logs / name, stack) for name in ("first", "second")]
        ended = time.monotonic()
        await (leader.kill() if crash else leader.stop())
        await cluster.apply_job()
        await cluster.gang_exists(seconds=60)
        return time.monotonic() - ended


async def _operator(cluster: Cluster, log: Path, stack: AsyncExitStack) -> Operator:
    operator = await Operator(cluster.namespace, cluster.kubeconfig, log, {"IDENTITY": log.name}).start()
    stack.push_async_callback(operator.kill)
    return await operator.ready()


async def _in_its_own_namespace(server: ApiServer, crash: bool, logs: Path) -> float:
    with as_kubeconfig(server.kubeconfig):
        cluster = await Cluster.connect(server.kubeconfig, f"bench-{secrets.token_hex(4)}")
    try:
        await cluster.create_namespace()
        return await takeover(cluster, crash, logs)
    finally:
        if not server.ours:
            await cluster.delete_namespace()
        await cluster.client.close()


async def measure(server: ApiServer, rounds: int, console: Console) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in TARGETS}
    for turn in range(rounds):
        for kind in TARGETS:
            with tempfile.TemporaryDirectory() as logs:
                found[kind].append(await _in_its_own_namespace(server, kind == "a crash", Path(logs)))
            console.print(f"round {turn + 1} of {rounds}, {kind}: {found[kind][-1]:.2f} s")
    return found


def report(found: dict[str, list[float]]) -> int:
    """A table, and whether the slowest of all is within its target."""
    table = Table(title="seconds until the standby has made a new job's pods")
    for column in ("after", "median", "least", "most", "target"):
        table.add_column(column, justify="left" if column == "after" else "right")
    for kind, seconds in found.items():
        shown = (statistics.median(seconds), min(seconds), max(seconds))
        table.add_row(kind, *(f"{value:.2f}" for value in shown), f"≤ {TARGETS[kind]:g}")
    Console(width=100).print(table)
    return 0 if all(max(seconds) <= TARGETS[kind] for kind, seconds in found.items()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.api_server.bench_takeover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: %(default)s)")
    rounds = parser.parse_args().rounds
    try:
        with api_server_running() as server:
            return report(asyncio.run(measure(server, rounds, Console(stderr=True))))
    except Impossible as missing:
        raise SystemExit(str(missing)) from None


if __name__ == "__main__":
    sys.exit(main())
