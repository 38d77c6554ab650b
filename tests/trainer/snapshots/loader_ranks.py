"""Ranks under torchrun that each have a data loader of their own.

Run as `torchrun --nproc-per-node=N loader_ranks.py OUT SCENARIO…` (scenarios.py).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import RANK, WORLD_SIZE, run

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots


class Loader:
    """A data loader with a position and a shuffle of its own on each rank."""

    def __init__(self, seed: int) -> None:
        self.position = 0
        self.order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))

    def batch(self) -> torch.Tensor:
        # ranks go on by another number of samples
        self.position += 1 + RANK
        return self.order[self.position % 100].float().expand(1, 4) / 100

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: Any) -> None:
        self.position, self.order = state["position"], state["order"]


class LoaderRun:
    """DDP with a loader of each rank's own and a scheduler that steps once an epoch of three steps."""

    def __init__(self, directory: Path, *, attempt: int, seed: int) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Linear(4, 1)
        self.ddp = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.1)
        self.loader = Loader(seed + RANK)
        self.events: list[SnapshotEvent] = []
        self.seen: list[Any] = []
        self.snapshots = Snapshots(
            directory,
            {"model": self.ddp, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader},
            per_rank=("loader",),
            every=SaveInterval.parse("3steps"),
            keep=9,
            identity=Identity("digits", "uid-1", 1, attempt, RANK, WORLD_SIZE),
            strategy="own",
            global_batch=WORLD_SIZE,
            on_event=self.events.append,
        )
        manifest = self.snapshots.resume()
        self.step = manifest.step if manifest else 0

    def train(self, until: int) -> Any:
        for step in range(self.step, until):
            self.optimizer.zero_grad()
            loss = self.ddp(self.loader.batch()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.seen.append([loss.item(), self.optimizer.param_groups[0]["lr"]])
            is_epoch_end = step % 3 == 2
            if is_epoch_end:
                self.scheduler.step()
            self.snapshots.step_end(Progress(step + 1, (step + 1) // 3, step), epoch_end=is_epoch_end)
        self.snapshots.close()
        dist.barrier()
        return {
            "first": self.step,
            "seen": self.seen,
            "position": self.loader.position,
            "order": self.loader.order.tolist(),
            "weights": self.model.weight.flatten().tolist(),
            "events": [event.message for event in self.events if event.result in ("reseeded", "failed")],
        }


def own_loaders(out: Path) -> Any:
    """Twelve steps, saved each epoch."""
    return LoaderRun(out / "loaders", attempt=0, seed=10).train(12)


def own_loaders_resumed(out: Path) -> Any:
    """From step 6, with loaders that were made with other seeds."""
    if RANK == 0:
        late = shutil.ignore_patterns("step-*9", "step-*12")
        shutil.copytree(out / "loaders", out / f"loaders-{WORLD_SIZE}", ignore=late)
    dist.barrier()
    return LoaderRun(out / f"loaders-{WORLD_SIZE}", attempt=1, seed=90).train(12)


def own_loaders_broken(out: Path) -> Any:
    """The loader of one rank has a state that no snapshot can hold: an error on all ranks, and none waits."""
    run = LoaderRun(out / "loaders-broken", attempt=0, seed=10)
    if RANK == 1:
        run.loader.state_dict = lambda: {"file": sys.stdin}  # type: ignore[method-assign]
    try:
        run.train(4)
    except UserError as error:
        return str(error)
    return None


if __name__ == "__main__":
    run((own_loaders, own_loaders_resumed, own_loaders_broken))
