"""Jobs that come, fail, restart, end and go for half an hour: nothing of the operator grows.

    python -m tests.api_server.soak [--jobs 1000] [--minutes 30]

A real API server, and a kubelet here that runs each pod and, a while later, lets it fail or succeed. As many jobs come
as go. Memory, descriptors, threads and the queue are read all the time; a line through the second half of the readings,
when all caches are filled, must not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.api_server.bench_operator import MIB, namespace, operating
from tests.api_server.fleet import Fleet, ended, fleet
from tests.api_server.harness import Cluster, Operator
from tests.api_server.server import ApiServer, api_server_running
from tests.kubernetes import Impossible

AT_ONCE = 40
READ_SECONDS = 2.0


@dataclass(frozen=True)
class Reading:
    at: float
    memory: float
    descriptors: int
    threads: int
    queue: float
    series: int


GROWTH = {"memory": 8.0, "descriptors": 8.0, "threads": 2.0, "queue": 8.0, "series": 20.0}
"""The most that each may rise over the second half, by the line that fits its readings best."""


async def read(operator: Operator, at: float) -> Reading:
    assert operator.process is not None
    process = Path(f"/proc/{operator.process.pid}")
    page = await operator.metrics()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    depth = next((float(line.split()[1]) for line in lines if line.startswith("ddpjob_operator_queue_depth")), 0.0)
    jobs = sum('ddpjob="' in line for line in lines)
    return Reading(
        at,
        operator.resident_bytes() / MIB,
        sum(1 for _ in (process / "fd").iterdir()),
        sum(1 for _ in (process / "task").iterdir()),
        depth,
        len(lines) - jobs,
    )


async def one_life(cluster: Cluster, seen: Fleet, name: str, chance: random.Random) -> None:
    """A job of two nodes: perhaps a failure, an eviction or a deleted pod, then its end, and its deletion."""
    await cluster.apply_job(name, restart={"backoff": {"initialSeconds": 0}, "maxRestarts": 10}, cleanPodPolicy="All")
    for attempt in range(3):
        pods = [f"{name}-{attempt}-{rank}" for rank in range(2)]
        await seen.until(lambda pods=pods: set(pods) <= seen.pods.keys(), f"{pods} exist")
        await seen.until(lambda: seen.phase(name) == "Running", f"{name} runs")
        await asyncio.sleep(chance.uniform(0, 2))
        match chance.choice(["end", "end", "fail", "evict", "delete"]) if attempt < 2 else "end":
            case "end":
                await asyncio.gather(*(seen.report(pod, ended(0)) for pod in pods))
                await seen.until(lambda: seen.phase(name) == "Succeeded", f"{name} has succeeded")
                break
            case "fail":
                await seen.report(pods[1], ended(137))
            case "evict":
                await seen.report(pods[1], {"phase": "Failed", "reason": "Evicted", "message": "low on memory"})
            case "delete":
                await cluster.reap(pods[0])
    await cluster.delete_job(name)
    await seen.until(lambda: name not in seen.jobs, f"{name} is gone")


async def churn(server: ApiServer, jobs: int, minutes: float, console: Console) -> list[Reading]:
    """All lives, evenly over the time, and what was read of the operator meanwhile."""
    readings: list[Reading] = []
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            namespace(server) as cluster,
            fleet(cluster) as seen,
            operating(cluster, Path(folder), RESYNC_SECONDS="30", POLL_SECONDS="1") as operator,
        ):
            limit, began = asyncio.Semaphore(AT_ONCE), seen.loop_time

            async def observe() -> None:
                while True:
                    readings.append(await read(operator, seen.loop_time - began))
                    await asyncio.sleep(READ_SECONDS)

            async def live(number: int) -> None:
                await asyncio.sleep(number * minutes * 60 / jobs)
                async with limit:
                    await one_life(cluster, seen, f"soak-{number}-{secrets.token_hex(2)}", chance)
                if number % max(1, jobs // 20) == 0:
                    console.print(f"{seen.loop_time - began:6.0f} s  job {number} of {jobs}: {readings[-1]}")

            watching = asyncio.create_task(observe())
            try:
                await asyncio.gather(*(live(number) for number in range(jobs)))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    return readings


def rise(readings: list[Reading], what: str) -> float:
    """How much it rises over the second half, by the line that fits best."""
    half = readings[len(readings) // 2 :]
    times, values = [one.at for one in half], [float(getattr(one, what)) for one in half]
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def report(readings: list[Reading]) -> int:
    table = Table(title=f"the operator over {readings[-1].at / 60:.1f} minutes")
    for column in ("", "first", "last", "most", "rise over the second half", "allowed"):
        table.add_column(column, justify="left" if not column else "right")
    bad = 0
    for what, allowed in GROWTH.items():
        values = [getattr(one, what) for one in readings]
        rises = rise(readings, what)
        bad += rises > allowed
        figures = (values[0], values[-1], max(values), rises)
        table.add_row(what, *(f"{figure:.1f}" for figure in figures), f"{allowed:g}{'  EXCEEDED' * (rises > allowed)}")
    Console(width=110).print(table)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.api_server.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    try:
        with api_server_running() as server:
            return report(asyncio.run(churn(server, given.jobs, given.minutes, Console(stderr=True))))
    except Impossible as missing:
        raise SystemExit(str(missing)) from None


if __name__ == "__main__":
    sys.exit(main())
