"""Saves snapshots and dies by SIGKILL at every single file operation; prints what is left, one JSON line a run.

Run as `python kill_points.py DIR`. A run is a forked process that sets out to claim a directory with two snapshots and
a leftover in it, resume, and save twice with retention. The first run is not killed and only counts the operations;
then there is one for each of them, dying before it, and for each write one that dies with half the bytes written.
Free of torch, so that hundreds of runs take seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.names import Series
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.trust.verify import files_in, sums

assert "torch" not in sys.modules

SERIES = cast(Series, sys.argv[2])

Result = TypeVar("Result")


def content(step: int) -> dict[str, bytes]:
    return {"model.safetensors": bytes([step]) * 70_000, "parts/state.json": json.dumps({"step": step}).encode()}


def manifest(step: int, attempt: int) -> Manifest:
    return Manifest("digits", "u", attempt, step, 0, step * 8, 1, "ddp", 8, 1.0)


class MortalDisk(Disk):
    """Counts operations and kills its own process at one of them."""

    def __init__(self, dies_at: int | None, torn: bool = False) -> None:
        self.dies_at = dies_at
        self.torn = torn
        self.operations: list[str] = []

    def _operation(self, name: str, path: Path, act: Callable[[], Result]) -> Result:
        self.operations.append(f"{name} {path.name}")
        if len(self.operations) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return act()

    def make_directory(self, path: Path) -> None:
        self._operation("mkdir", path, lambda: super(MortalDisk, self).make_directory(path))

    def create(self, path: Path, chunks: Any) -> FileEntry:
        return self._operation("create", path, lambda: super(MortalDisk, self).create(path, chunks))

    def write(self, descriptor: int, view: memoryview) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self.torn and len(self.operations) + 1 == self.dies_at:
            os.write(descriptor, view[: len(view) // 2])
        return self._operation("write", path, lambda: super(MortalDisk, self).write(descriptor, view))

    def sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self._operation("fsync", path, lambda: super(MortalDisk, self).sync(descriptor))

    def fsync(self, path: Path) -> None:
        self._operation("fsync", path, lambda: super(MortalDisk, self).fsync(path))

    def rename(self, source: Path, target: Path) -> None:
        self._operation("rename", target, lambda: super(MortalDisk, self).rename(source, target))

    def remove_tree(self, path: Path) -> None:
        """File by file, so that it can be cut short anywhere."""
        for child in sorted(path.rglob("*"), reverse=True):
            self._operation("remove", child, child.rmdir if child.is_dir() else child.unlink)
        if path.exists():
            self._operation("remove", path, path.rmdir)


def write(disk: Disk, step: int) -> Callable[[Path], dict[str, FileEntry]]:
    def fill(directory: Path) -> dict[str, FileEntry]:
        disk.make_directory(directory / "parts")
        return {
            name: disk.create(directory / name, [data[:40_000], data[40_000:]]) for name, data in content(step).items()
        }

    return fill


def opened(directory: Path, attempt: int, disk: Disk) -> SnapshotStore:
    fence = Fence.acquire(directory, created=1, attempt=attempt, uid="u", disk=disk)
    return SnapshotStore(directory, keep=2, fence=fence, disk=disk, series=SERIES)


def save(store: SnapshotStore, step: int, attempt: int) -> None:
    """A snapshot in one call, a checkpoint as ranks write it."""
    if SERIES == "step":
        store.save(write(store.disk, step), manifest(step, attempt))
        return
    folder = store.begin(manifest(step, attempt))
    write(store.disk, step)(folder)
    store.commit(folder, manifest(step, attempt).with_files(sums(folder, files_in(folder), store.disk)))


def live(directory: Path, attempt: int, disk: Disk, report: Callable[[int], object]) -> None:
    """One run: claim, resume, save two more steps; `report` gets each step that save() has promised."""
    store = opened(directory, attempt, disk)
    newest = store.newest_valid()
    start = newest.step if newest else 0
    for step in (start + 1, start + 2):
        save(store, step, attempt)
        report(step)


def live_forked(directory: Path, disk: Disk) -> tuple[int, bytes]:
    """One run in a process of its own: its wait status and the promised steps, a byte each."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        live(directory, 1, disk, lambda step: os.write(writer, bytes([step])))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    promised = os.read(reader, 64)
    os.close(reader)
    return status, promised


def prepare(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    live(directory, 0, Disk(), lambda step: None)
    leftover = directory / f".tmp-{SERIES}-000000000009-0-1"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")


def inspect(directory: Path, attempt: int) -> dict[str, Any]:
    """What the next attempt finds."""
    store = opened(directory, attempt, Disk())
    newest = store.newest_valid()
    step = newest.step if newest else 0
    intact = all((store.path(step) / name).read_bytes() == data for name, data in content(step).items())
    bad = []
    for there in store.steps():
        try:
            store.verify(there)
        except SnapshotError as error:
            bad.append(f"{there}: {error}")
    odd = [path.name for path in directory.iterdir() if path.name.startswith(".tmp") or path.name.endswith(".corrupt")]
    save(store, step + 1, attempt)
    again = store.newest_valid()
    return {"newest": step, "intact": intact, "odd": odd, "bad": bad, "next": again.step if again else None}


def main(directory: Path) -> None:
    prepare(directory)
    counting = MortalDisk(None)
    live(directory, 1, counting, lambda step: None)
    runs = [(number, False) for number in range(1, len(counting.operations) + 1)]
    runs += [(number, True) for number, torn in runs if counting.operations[number - 1].startswith("write")]
    for number, torn in runs:
        prepare(directory)
        status, promised = live_forked(directory, MortalDisk(number, torn))
        run = {
            "operation": counting.operations[number - 1],
            "torn": torn,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "promised": max(promised, default=2),
        }
        print(json.dumps({**run, **inspect(directory, 2)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
