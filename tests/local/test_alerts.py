"""Faults of a real run make the chart's alerts fire on a real Prometheus; a run that is well beside it fires none.

The launchers are scraped as they are, and the operator's page shows the status of both runs. The kubelet is stood in
for: it says what the file system says of a volume that is really full. The faults of the operator are in
tests/api_server/test_alerts.py. That a GPU does nothing is seen by promtool alone: there is none here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus import Prometheus, started
from tests.local.test_dashboards import NAMESPACE, Watched, status_port
from tests.packaging.test_monitors import served
from tests.support import local_run
from tests.support.alerts import Fired, fired, shortened_file
from tests.support.local_run import new_job
from tests.support.tiers import program
from tests.support.tmpfs import small_tmpfs
from tests.support.waiting import eventually

from ddpjob_operator import metrics
from ddpjob_operator.local.observed import RunView
from ddpjob_operator.local.volume import open_shared

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

SHORTER = {
    "DDPJobStalled": 240,  # 7.5 s
    "DDPJobGoodputLow": 240,  # of 15 s, for 4 s
    "DDPJobSnapshotTooOld": 900,  # 8 s
    "DDPJobSnapshotsFailing": 240,
    "DDPJobVolumeNearlyFull": 240,
    # to start takes a run as long as on a cluster
    "DDPJobCrashLooping": 60,
    "DDPJobQueueStuck": 60,
    "DDPJobGPUsIdle": 60,
}
UNTOUCHED = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.ones(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for batch, targets in DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), targets).backward()
        optimizer.step()
        time.sleep(0.02)
"""
SPECS: dict[str, dict[str, Any]] = {
    "well": {"nodes": 1, "entrypoint": {"script": "/mnt/shared/train.py"}},
    "faulty": {
        "nodes": 1,
        "args": ["--task", "digits", "--epochs", "1000000"],
        "snapshots": {"every": "1seconds"},
        "stall": {"minSeconds": 600, "maxSeconds": 1800},
        "restart": {"backoff": {"initialSeconds": 0}},
    },
}


class Shown(Watched):
    """Keeps the process of the newest launcher too."""

    pid: int | None = None

    def show(self, view: RunView) -> None:
        super().show(view)
        self.pid = next((node.pid for node in view.nodes if node.pid), None)

    @property
    def step(self) -> int:
        return (self.status.progress.step or 0) if self.status.progress else 0

    def rank(self) -> int:
        """The process of rank 0."""
        assert self.pid is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{status_port(self.pid)}/status", timeout=60) as answer:
            pid: int = json.load(answer)["ranks"][0]["pid"]
        return pid


def fill(folder: Path) -> Path:
    """A file that takes all that is free on the volume."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            return filler
    raise AssertionError


def kubelet(claim: str, folder: Path) -> Callable[[str], tuple[bytes, str]]:
    def page(accept: str) -> tuple[bytes, str]:
        found, labels = os.statvfs(folder), f'{{namespace="{NAMESPACE}",persistentvolumeclaim="{claim}"}}'
        text = (
            f"kubelet_volume_stats_available_bytes{labels} {found.f_bavail * found.f_frsize}\n"
            f"kubelet_volume_stats_capacity_bytes{labels} {found.f_blocks * found.f_frsize}\n"
        )
        return text.encode(), "text/plain; version=0.0.4"

    return page


@contextmanager
def watching(folder: Path, volume: Path) -> Iterator[Prometheus]:
    """A Prometheus with the rules, which scrapes the operator's page, both runs and the kubelet."""
    binary = program("prometheus", "prometheus")
    with (
        served(lambda accept: asyncio.run(metrics.page(accept))) as operator,
        served(kubelet("faulty-shared", volume)) as page,
    ):
        scrapes: list[dict[str, Any]] = [
            {"job_name": "operator", "static_configs": [{"targets": [operator]}]},
            {"job_name": "trainer", "file_sd_configs": [{"files": [f"{folder}/targets-*.json"]}]},
            {"job_name": "kubelet", "honor_labels": True, "static_configs": [{"targets": [page]}]},
        ]
        with started(Path(binary), scrapes, folder, shortened_file(folder, SHORTER), every="500ms") as server:
            yield server


async def until_fired(server: Prometheus, expected: Fired, display: Shown) -> None:
    await asyncio.to_thread(
        eventually, lambda: expected <= fired(server), f"{sorted(expected)} fire", 60,
        lambda: [sorted(fired(server)), display.status.model_dump(), *server.scrape_errors()],
    )  # fmt: skip


async def test_each_fault_of_a_run_fires_its_alerts_and_a_run_that_is_well_fires_none(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "48m") as volume:
        shared = {"well": open_shared(tmp_path / "well"), "faulty": open_shared(volume)}
        (shared["well"] / "train.py").write_text(textwrap.dedent(UNTOUCHED))
        jobs = {name: new_job(name, spec, namespace=NAMESPACE) for name, spec in SPECS.items()}
        shown = {name: Shown(job, tmp_path / f"targets-{name}.json") for name, job in jobs.items()}
        runs = [asyncio.create_task(local_run.run(jobs[name], shared[name], shown[name])) for name in jobs]
        faulty = shown["faulty"]
        try:
            # their start takes seconds, which are hours of the rules
            await asyncio.to_thread(
                eventually, lambda: all(each.step for each in shown.values()) and faulty.status.snapshot,
                "both runs train, and one has a snapshot",
            )  # fmt: skip
            with watching(tmp_path, volume) as server:
                await asyncio.to_thread(
                    eventually, lambda: len(server.query("ddpjob_trainer_info")) == 2, "both runs are scraped",
                    instead=server.scrape_errors,
                )  # fmt: skip
                assert fired(server) == set()
                filler = fill(volume)
                await until_fired(
                    server, {("DDPJobSnapshotsFailing", "faulty"), ("DDPJobVolumeNearlyFull", "faulty-shared")}, faulty
                )
                assert not fired(server) & {("DDPJobStalled", "faulty"), ("DDPJobGoodputLow", "faulty")}
                rank = faulty.rank()
                os.kill(rank, signal.SIGSTOP)
                await until_fired(server, {("DDPJobSnapshotTooOld", "faulty"), ("DDPJobStalled", "faulty")}, faulty)
                assert ("DDPJobGoodputLow", "faulty") not in fired(server)
                filler.unlink()
                os.kill(rank, signal.SIGKILL)
                await until_fired(server, {("DDPJobGoodputLow", "faulty")}, faulty)
                assert faulty.status.restarts == 1
                assert [alert for alert, about in fired(server) if about not in ("faulty", "faulty-shared")] == []
                assert not any(run.done() for run in runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            metrics.JOBS.clear()
