"""A replicated state saved in two ways: by rank 0 in whole files, or in parts that DCP shares out to all ranks.

    torchrun --nproc-per-node 2 -m tests.benchmarks.bench_save_paths [--mb 400] [--rounds 7] [--directory DIR]

Both ways take turns in one run, so that a busy machine slows both. Rank 0 prints for each: how long training stood
still (the longest of all ranks), how long until the snapshot was safe, its bytes, and how long a resume took.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_trainer.rank.world import World, describe_world, process_group
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, Snapshots
from ddp_trainer.snapshots.sharded import ShardedOptimizer

LAYERS = 40
WAYS = ("whole files", "DCP parts")


class Training:
    """Linear layers with AdamW, the same on every rank: a third of `megabytes` is weights, the rest moments."""

    def __init__(self, directory: Path, way: str, megabytes: int, world: World) -> None:
        width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        parts = way == "DCP parts"
        self.snapshots = Snapshots(
            directory / way.replace(" ", "-"),
            {
                "model": self.model,
                "optimizer": ShardedOptimizer(self.model, self.optimizer) if parts else self.optimizer,
            },
            every=SaveInterval.parse("1000000steps"),
            keep=1,
            identity=Identity("bench", "uid", 1, 0, world.rank, world.size),
            strategy="ddp",
            global_batch=1,
            sharded=("model", "optimizer") if parts else (),
        )

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()


def longest(act: Callable[[], object]) -> float:
    """Seconds on the slowest rank; all begin together."""
    dist.barrier()
    started = time.perf_counter()
    act()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def one_round(training: Training, directory: Path, way: str, megabytes: int, world: World, step: int) -> list[float]:
    """Stall, seconds until it is safe, bytes, seconds of a resume."""
    progress = Progress(step, 0, step)
    training.step()
    began = time.perf_counter()
    stall = longest(lambda: training.snapshots.save(progress))
    training.snapshots.save(progress, wait=True)
    dist.barrier()
    safe = time.perf_counter() - began
    manifest = training.snapshots.last_saved
    resumed = Training(directory, way, megabytes, world)
    resume = longest(resumed.snapshots.resume)
    return [stall, safe, float(manifest.total_bytes if manifest else 0), resume]


def measure(directory: Path, megabytes: int, rounds: int, world: World) -> dict[str, list[list[float]]]:
    trainings = {way: Training(directory, way, megabytes, world) for way in WAYS}
    for training in trainings.values():
        training.snapshots.resume()
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            row = one_round(trainings[way], directory, way, megabytes, world, number + 1)
            if number:  # the first round allocates buffers
                found[way].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_save_paths", description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="size of the state in MB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where to save (default: the directory for temporary files)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = describe_world(device="cpu")
    with process_group(world, timeout_seconds=300):
        names = [tempfile.mkdtemp(prefix="bench-save-", dir=options.directory) if world.leads else None]
        dist.broadcast_object_list(names, src=0)
        folder = Path(str(names[0]))
        try:
            found = measure(folder, options.mb, options.rounds, world)
        finally:
            if world.leads:
                shutil.rmtree(folder)
        if world.leads:
            print(f"{options.mb} MB replicated on {world.size} ranks, median of {options.rounds} rounds (lowest)")
            for way, rows in found.items():
                stall, safe, size, resume = zip(*rows, strict=True)
                print(
                    f"{way}: stall {statistics.median(stall) * 1e3:.0f} ms ({min(stall) * 1e3:.0f}), safe after "
                    f"{statistics.median(safe):.2f} s ({min(safe):.2f}), {size[-1]:,.0f} bytes, "
                    f"resume {statistics.median(resume):.2f} s ({min(resume):.2f})"
                )


if __name__ == "__main__":
    main()
