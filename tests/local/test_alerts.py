"""Faults of a real run make the chart's alerts fire on a real Prometheus; a run that is well beside it fires none.

The launchers are scraped as they are, and the operator's page shows the status of both runs. The kubelet is stood in
for: it says what the file system says of a volume that is really full. So is DCGM's exporter: no run here has a GPU,
and that of a rank that is stopped does nothing. The faults of the operator are in tests/api_server/test_alerts.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus import Prometheus, started
from tests.local.conftest import paced
from tests.local.test_dashboards import NAMESPACE, Watched, status_port
from tests.packaging.test_monitors import served
from tests.support import local_run
from tests.support.alerts import Fired, fired, shortened_file
from tests.support.local_run import new_job
from tests.support.tiers import program
from tests.support.tmpfs import small_tmpfs
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddpjob_operator import metrics
from ddpjob_operator.local.observed import RunView
from ddpjob_operator.local.volume import open_shared

pytestmark = pytest.mark.local

SHORTER = {
    "DDPJobStalled": 240,  # 7.5 s
    "DDPJobGoodputLow": 240,  # of 15 s, for 4 s
    "DDPJobSnapshotTooOld": 900,  # 8 s
    "DDPJobSnapshotsFailing": 240,
    "DDPJobVolumeNearlyFull": 240,
    "DDPJobGPUsIdle": 360,  # of 5 s, for 1.7 s
    # to start takes a run as long as on a cluster
    "DDPJobCrashLooping": 60,
    "DDPJobQueueStuck": 60,
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
        **paced(epochs=1_000_000),
        "snapshots": {"every": "1seconds"},
        "stall": {"minSeconds": 600, "maxSeconds": 1800},
        "restart": {"backoff": {"initialSeconds": 0}},
    },
}


class Shown(Watched):
    """Keeps the process and the pod of the newest launcher too, and what its GPU would do."""

    pid: int | None = None
    pod: str = ""
    gpu_percent: int = 90

    def show(self, view: RunView) -> None:
        super().show(view)
        self.pid, self.pod = next(((node.pid, node.pod) for node in view.nodes if node.pid), (None, self.pod))

    @property
    def step(self) -> int:
        return (self.status.progress.step or 0) if self.status.progress else 0

    def stop(self) -> int:
        """Stop rank 0 in a training step: its time would go to the save or the validation that it is stopped in."""
        while True:
            rank = self._rank()
            os.kill(rank["pid"], signal.SIGSTOP)
            if self._rank()["phase"] == "train":
                return int(rank["pid"])
            os.kill(rank["pid"], signal.SIGCONT)
            time.sleep(0.01)

    def _rank(self) -> dict[str, Any]:
        assert self.pid is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{status_port(self.pid)}/status", timeout=60) as answer:
            rank: dict[str, Any] = json.load(answer)["ranks"][0]
        return rank


def fill(folder: Path) -> Path:
    """A file that takes all that is free on the volume. Again, it takes what has become free since."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
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


def dcgm(runs: Collection[Shown]) -> Callable[[str], tuple[bytes, str]]:
    """The page of an exporter that names the pods."""

    def page(accept: str) -> tuple[bytes, str]:
        text = "".join(
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",namespace="{NAMESPACE}",pod="{run.pod}"}} {run.gpu_percent}\n'
            for run in runs
        )
        return text.encode(), "text/plain; version=0.0.4"

    return page


@contextmanager
def watching(folder: Path, volume: Path, runs: Collection[Shown]) -> Iterator[Prometheus]:
    """A Prometheus with the rules, which scrapes the operator's page, the runs, the kubelet and DCGM's exporter."""
    binary = program("prometheus", "prometheus")
    with (
        served(lambda accept: asyncio.run(metrics.page(accept))) as operator,
        served(kubelet("faulty-shared", volume)) as page,
        served(dcgm(runs)) as gpus,
    ):
        exporter = {"namespace": "gpu-operator", "pod": "dcgm-x"}
        scrapes: list[dict[str, Any]] = [
            {"job_name": "operator", "static_configs": [{"targets": [operator]}]},
            {"job_name": "trainer", "file_sd_configs": [{"files": [f"{folder}/targets-*.json"]}]},
            {"job_name": "kubelet", "honor_labels": True, "static_configs": [{"targets": [page]}]},
            {"job_name": "dcgm", "static_configs": [{"targets": [gpus], "labels": exporter}]},
        ]
        with started(Path(binary), scrapes, folder, shortened_file(folder, SHORTER), every="500ms") as server:
            yield server


async def until_fired(
    server: Prometheus, expected: Fired, display: Shown, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """`meanwhile` is called before each look."""

    def have_fired() -> bool:
        meanwhile()
        return expected <= fired(server)

    await asyncio.to_thread(
        eventually, have_fired, f"{sorted(expected)} fire", PATIENCE_SECONDS,
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
            with watching(tmp_path, volume, shown.values()) as server:
                await asyncio.to_thread(
                    eventually,
                    lambda: len(server.query("ddpjob_trainer_info")) == len(server.query("DCGM_FI_DEV_GPU_UTIL")) == 2,
                    "both runs and their GPUs are scraped", instead=server.scrape_errors,
                )  # fmt: skip
                assert fired(server) == set()
                filler = fill(volume)
                full = {("DDPJobSnapshotsFailing", "faulty"), ("DDPJobVolumeNearlyFull", "faulty-shared")}
                # a save that was under way may have ended since, and an old snapshot made room for the next
                await until_fired(server, full, faulty, lambda: fill(volume))
                later = {(f"DDPJob{fault}", "faulty") for fault in ("Stalled", "GoodputLow", "GPUsIdle")}
                assert not fired(server) & later
                rank = await asyncio.to_thread(faulty.stop)
                faulty.gpu_percent = 0
                stopped = {(f"DDPJob{fault}", "faulty") for fault in ("SnapshotTooOld", "Stalled", "GPUsIdle")}
                await until_fired(server, stopped, faulty)
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
