"""What a snapshot costs: training's stall beside one memcpy of the state, and a resume beside reading and verifying it.

    python -m tests.benchmarks.bench_snapshots [--mb 1000] [--rounds 5] [--directory DIR] [--device cuda]

All four take turns in one process, so that a busy machine slows all of them. Where all cores are taken, the thread that
sums the bytes cannot run beside the one that reads them, and the ratio of the clock goes towards the processor's. With
CUDA the state is on the device, and the memcpy goes to pinned memory of the host.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tests.benchmarks.table import Cost, Finding, Ratio, measured, report

from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.trust.names import step_directory

MAX_STALL = 1.3
"""The most that training may stop, as a multiple of one memcpy of the state into a reused buffer."""
MAX_RESUME = 1.2
"""The most that a resume may take, as a multiple of reading and summing the files."""

LAYERS = 40


class Training:
    """A model of linear layers with AdamW: a third of `megabytes` is weights, the rest moments."""

    def __init__(
        self,
        directory: Path,
        megabytes: int,
        *,
        attempt: int,
        device: str = "cpu",
        on_event: Callable[[SnapshotEvent], None] | None = None,
    ) -> None:
        width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.snapshots = Snapshots(
            directory,
            {"model": self.model, "optimizer": self.optimizer},
            every=SaveInterval.parse("1000000steps"),
            keep=1,
            identity=Identity("bench", "uid", 1, attempt, 0, 1),
            strategy="single",
            global_batch=1,
            on_event=on_event,
        )

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()


def read_and_verify(directory: Path) -> None:
    """The least that a resume has to do: every byte through one block of memory and SHA-256."""
    block = bytearray(4 << 20)
    view = memoryview(block)
    for path in sorted(directory.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(view[:count])
        digest.hexdigest()


def rounds(directory: Path, megabytes: int, count: int, device: str) -> dict[str, list[Cost]]:
    """Measure each of the four `count` times, in turns, after one round that fills caches and buffers."""
    costs: dict[str, list[Cost]] = {"memcpy": [], "stall": [], "read and verify": [], "resume": []}
    saving = Training(directory, megabytes, attempt=0, device=device)
    saving.snapshots.resume()
    saving.step()
    state = torch.ones(megabytes * 1_000_000, dtype=torch.uint8, device=device)
    buffer = torch.zeros(state.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    for number in range(count + 1):
        progress = Progress(number + 1, 0, number + 1)
        memcpy = measured(lambda: buffer.copy_(state))
        stall = measured(lambda progress=progress: saving.snapshots.save(progress))  # type: ignore[misc]
        if not saving.snapshots.save(progress, wait=True):
            raise SystemExit(f"the snapshot could not be saved to {directory}")
        reading = measured(lambda step=progress.step: read_and_verify(directory / step_directory(step)))  # type: ignore[misc]
        # The same attempt, as after a restart in place: a newer one would fence the one that goes on saving.
        resuming = Training(directory, megabytes, attempt=0, device=device)
        resume = measured(resuming.snapshots.resume)
        if number:
            for name, cost in zip(costs, (memcpy, stall, reading, resume), strict=True):
                costs[name].append(cost)
    return costs


def findings(directory: Path | None, megabytes: int, count: int, device: str = "cpu") -> list[Finding]:
    """The targets, measured with a state of so many MB in a new folder below `directory`."""
    folder = Path(tempfile.mkdtemp(prefix="bench-snapshots-", dir=directory))
    try:
        costs = rounds(folder / "bench", megabytes, count, device)
    finally:
        shutil.rmtree(folder)
    return [
        Ratio(f"stall of a snapshot, {megabytes} MB", "memcpy", costs["stall"], costs["memcpy"], MAX_STALL),
        Ratio(f"resume, {megabytes} MB", "read and verify", costs["resume"], costs["read and verify"], MAX_RESUME),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_snapshots", description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="size of the state in MB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where to save (default: the directory for temporary files)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return report(findings(options.directory, options.mb, options.rounds, options.device))


if __name__ == "__main__":
    sys.exit(main())
