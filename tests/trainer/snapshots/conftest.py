"""A job's directory on the volume, and small snapshots in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore

HERE = Path(__file__).parent


def manifest_of(step: int, attempt: int = 0) -> Manifest:
    return Manifest("digits", "uid-1", attempt, step, 0, step * 8, 1, "ddp", 8, 1763703999.0)


def content_of(step: int) -> bytes:
    return bytes([step % 256]) * 4096


@dataclass
class Volume:
    """The directory of one job, and writers of its attempts."""

    directory: Path

    def writer(self, attempt: int = 0, *, keep: int = 3, disk: Disk | None = None) -> SnapshotStore:
        fence = Fence.acquire(self.directory, created=1, attempt=attempt, uid="uid-1")
        return SnapshotStore(self.directory, keep=keep, fence=fence, disk=disk)

    def reader(self) -> SnapshotStore:
        return SnapshotStore(self.directory, keep=1, fence=None)

    def save(self, store: SnapshotStore, step: int, data: bytes | None = None) -> Manifest:
        attempt = store.fence.own.attempt if store.fence else 0
        data = content_of(step) if data is None else data
        return store.save(
            lambda directory: {"model.safetensors": store.disk.create(directory / "model.safetensors", [data])},
            manifest_of(step, attempt),
            expected_bytes=len(data),
        )

    def step(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def names(self) -> set[str]:
        return {path.name for path in self.directory.iterdir() if path.name != "attempts"}


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    directory = tmp_path / "checkpoints" / "digits"
    directory.mkdir(parents=True)
    return Volume(directory)


@pytest.fixture
@starts_processes
def run_script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of this folder, or `-m module`, with the trainer importable and one thread of arithmetic."""

    def run(*args: str, timeout: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        trainer = HERE.parents[2] / "trainer_image"
        environ = {**os.environ, "PYTHONPATH": str(trainer), "OMP_NUM_THREADS": "1"}
        command = [str(HERE / arg) if arg.endswith(".py") else arg for arg in args]
        return subprocess.run(
            [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
