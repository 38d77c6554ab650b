"""What `ddpjob dashboard` takes to list 1,000 jobs: the first time, and again when nothing has changed.

    make bench-page
    python -m tests.benchmarks.bench_page [--rounds 5]

Of a cluster, whose answer is there already: parsing, rendering and HTTP are measured. Of a folder, in which each job
has a long history. Of a cluster with a mounted volume that has 1,000 jobs more, of which the newest 200 are shown. Each
round is a process of its own, as the command is. Exit code 1 if for a cluster the median of the first requests is above
200 ms of processor time; the others are reported beside it, and as a ratio to it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from aiohttp.test_utils import TestClient, TestServer

from ddpjob_operator.page.cluster import ClusterSource
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.server import make_app
from ddpjob_operator.page.values import Source
from ddpjob_operator.page.volumes import Volumes
from ddpjob_operator.runtime.client import Client

JOBS = 1000
MOST_SECONDS = 0.2
SOURCES = ("cluster", "folder", "volume")
CONDITION = {"type": "Running", "status": "True", "reason": "AllReady", "message": "all pods are ready"}
STATUS = {
    "phase": "Running", "attempt": 1, "restarts": 1, "startTime": "2030-01-01T11:00:00Z",
    "nodes": {"ready": 2, "total": 2}, "goodput": {"training": 5.0, "ratio": 0.5},
    "progress": {"step": 10, "totalSteps": 100, "loss": 1.0, "metrics": {"eval_accuracy": 0.5}},
    "conditions": [CONDITION | {"lastTransitionTime": "2030-01-01T11:00:00Z"}] * 3,
}  # fmt: skip


class Server:
    """A cluster with many jobs, at no distance."""

    namespace = "team"

    def __init__(self, jobs: int = JOBS) -> None:
        self._jobs = jobs

    async def list(self, path: str, resource: str) -> tuple[list[dict[str, Any]], int]:
        return [_job(number) for number in range(self._jobs)], 1


def _job(number: int) -> dict[str, Any]:
    metadata = {"name": f"job-{number:04}", "namespace": "team", "uid": str(number), "resourceVersion": "1"}
    created = {"creationTimestamp": "2030-01-01T11:00:00Z"}
    return {"metadata": metadata | created, "spec": {"nodes": 2, "procsPerNode": 4}, "status": STATUS}


def write_folder(root: Path, names: Iterable[str], status: bool = True) -> None:
    """As long runs leave it, with or (of a cluster) without a status file. Jobs share their files by hard links."""
    content = {"version": 1, "uid": "u", "created": "2030-01-01T11:00:00Z", "nodes": 2, "procsPerNode": 4}
    events = [{"time": 1893495600.0 + step, "attempt": 0, "event": "epoch", "step": step} for step in range(10_000)]
    events[0] |= {"event": "started", "totalSteps": 10_000}
    files = {
        "events.jsonl": "".join(f"{json.dumps(event)}\n" for event in events),
        "losses/001893495600-000000-u.jsonl": '{"attempt": 0, "resumedAfter": 0}\n' * 10_000,
        **({"status.json": json.dumps(content | {"status": STATUS | {"phase": "Succeeded"}})} if status else {}),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        for job in names:
            path = root / "logs" / job / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(root / name, path)


def source_of(kind: str, root: Path, jobs: int = JOBS) -> Source:
    """One of SOURCES, with so many jobs."""
    server, names = cast(Client, Server(jobs)), [f"left-{number:04}" for number in range(jobs)]
    if kind == "cluster":
        return ClusterSource(server, "team")
    write_folder(root, names, status=kind == "folder")
    return (
        FolderSource.at(root)
        if kind == "folder"
        else ClusterSource(server, "team", volumes=Volumes.at(root, "team/data"))
    )


async def requests(source: Source) -> list[float]:
    """Seconds of processor time of the first request and of one after it."""
    found = []
    async with TestClient(TestServer(make_app(source))) as browser:
        gc.freeze()  # as the command does
        for _ in range(2):
            began = time.process_time()
            await (await browser.get("/")).text()
            found.append(time.process_time() - began)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_page", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes (default: %(default)s)")
    parser.add_argument("--one", choices=SOURCES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(requests(source_of(given.one, Path(folder))))))
        return 0
    medians = {}
    for kind in SOURCES:
        command = [sys.executable, "-m", "tests.benchmarks.bench_page", "--one", kind]
        rounds = [json.loads(subprocess.check_output(command)) for _ in range(given.rounds)]
        first, again = (statistics.median(column) for column in zip(*rounds, strict=True))
        medians[kind] = first
        ratio = f" ({first / medians['cluster']:.1f} times that of the cluster)" if kind != "cluster" else ""
        print(f"{kind}: first request {first * 1000:.0f} ms{ratio}, the next {again * 1000:.0f} ms of processor time")
    return int(medians["cluster"] > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
