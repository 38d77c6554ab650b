"""Ranks under torchrun that hold a model in parts; each writes what it saw to OUT/<scenario>-<world size>-<rank>.json.

Run as `torchrun --nproc-per-node=N sharded_ranks.py OUT SCENARIO…`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots import sharded
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.sharded import ShardedOptimizer
from ddp_trainer.snapshots.trust.disk import Disk

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class Run:
    """FSDP2 over all ranks; the global batch of 12 does not depend on their number."""

    def __init__(
        self,
        directory: Path,
        *,
        attempt: int,
        model: type[torch.nn.Module] | None = None,
        seed: int = 0,
        dropout: float = 0.0,
        save_timeout: float = 30,
    ) -> None:
        torch.manual_seed(seed)
        # 7 rows do not divide by 2 ranks: parts of unequal size
        two_layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(dropout), torch.nn.Linear(7, 3))
        self.model = two_layers if model is None else model()
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.events: list[SnapshotEvent] = []
        self.step = 0
        self.losses: list[float] = []
        self.snapshots = Snapshots(
            directory,
            {
                "model": self.model,
                "optimizer": ShardedOptimizer(self.model, self.optimizer),
                "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 3),
            },
            sharded=("model", "optimizer"),
            every=SaveInterval.parse("2steps"),
            keep=9,
            identity=Identity("digits", "uid-1", 1, attempt, RANK, WORLD_SIZE),
            strategy="fsdp",
            global_batch=12,
            on_event=self.events.append,
            save_timeout=save_timeout,
        )

    def resume(self) -> int | None:
        manifest = self.snapshots.resume()
        self.step = manifest.step if manifest else 0
        return manifest.step if manifest else None

    def train(self, until: int) -> None:
        while self.step < until:
            batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            loss = self.model(batch[RANK::WORLD_SIZE]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.losses.append(loss.item())
            self.snapshots.step_end(Progress(self.step, 0, self.step * 12))

    def weights(self) -> list[float]:
        full = [tensor.full_tensor() for tensor in self.model.state_dict().values()]
        return [value for tensor in full for value in tensor.flatten().tolist()]

    def moments(self) -> list[float]:
        state = [self.optimizer.state[parameter]["exp_avg_sq"].full_tensor() for parameter in self.model.parameters()]
        return [value for tensor in state for value in tensor.flatten().tolist()]


def save(out: Path) -> Any:
    """Two ranks save at steps 2 and 4 and train on to 6."""
    run = Run(out / "fsdp", attempt=0, dropout=0.3)
    run.resume()
    run.train(4)
    run.snapshots.close()
    dist.barrier()
    at_save = run.weights(), run.moments()
    run.train(6)
    run.snapshots.close()
    dist.barrier()
    return {"at_save": at_save, "end": run.weights(), "losses": run.losses, "events": [e.result for e in run.events]}


def resume(out: Path) -> Any:
    """Any number of ranks resume at step 4 what two have saved."""
    if RANK == 0:
        shutil.rmtree(out / "fsdp-copy", ignore_errors=True)
        shutil.copytree(out / "fsdp", out / "fsdp-copy", ignore=shutil.ignore_patterns("step-000000000006"))
    dist.barrier()
    run = Run(out / "fsdp-copy", attempt=WORLD_SIZE, seed=70, dropout=0.3)
    step = run.resume()
    at_resume = run.weights(), run.moments()
    run.train(6)
    run.snapshots.close()
    return {
        "step": step,
        "at_resume": at_resume,
        "end": run.weights(),
        "losses": run.losses,
        "events": [event.result for event in run.events],
    }


class Branched(torch.nn.Module):
    """Two heads: one has its first gradient when it is used, and no state in the optimizer before."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(5, 7)
        self.head = torch.nn.Linear(7, 3)
        self.late = torch.nn.Linear(7, 3)
        self.never = torch.nn.Linear(7, 3)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        return self.head(hidden) + self.late(hidden) if self.uses_late else self.head(hidden)


class BranchedRun(Run):
    """The late head begins to train at step 6."""

    def __init__(self, directory: Path, *, attempt: int, seed: int = 0) -> None:
        super().__init__(directory, attempt=attempt, model=Branched, seed=seed)

    def train(self, until: int) -> None:
        for step in range(self.step, until):
            self.model.uses_late = step >= 6
            super().train(step + 1)

    def states(self) -> dict[str, Any]:
        """Every tensor whole, by parameter: its value and, where the optimizer has any, its state."""
        whole = {name: value.full_tensor().flatten().tolist() for name, value in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                whole[f"{name}.{key}"] = full.flatten().tolist()
        return whole


def branched_unbroken(out: Path) -> Any:
    """Ten steps without a break, of which nothing is resumed."""
    run = BranchedRun(out / "unbroken", attempt=0)
    run.resume()
    run.train(10)
    run.snapshots.close()
    return run.states()


def branched_part(out: Path, attempt: int, until: int) -> Any:
    run = BranchedRun(out / "branched", attempt=attempt, seed=attempt)
    at_resume = {"step": run.resume(), "states": run.states()}
    run.train(until)
    run.snapshots.save(Progress(until, 0, until * 12), kind="final", wait=True)
    run.snapshots.close()
    return {"at_resume": at_resume, "at_end": run.states()}


def branched_first(out: Path) -> Any:
    """Two of three heads have had no gradient."""
    return branched_part(out, 0, 4)


def branched_second(out: Path) -> Any:
    """The late head gets its first gradient."""
    return branched_part(out, 1, 8)


def branched_third(out: Path) -> Any:
    """One head has had no gradient to the end."""
    return branched_part(out, 2, 10)


class BrokenDisk(Disk):
    def create(self, path: Path, chunks: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def one_rank_cannot_write(out: Path) -> Any:
    """A part that is missing must not become a snapshot, and the next save must work."""
    run = Run(out / "broken", attempt=0)
    run.resume()
    run.train(1)
    if RANK == 1:
        good, sharded.StagedShard.write = (
            sharded.StagedShard.write,
            lambda self, directory, _: good(self, directory, BrokenDisk()),
        )  # type: ignore[method-assign]
    bad = run.snapshots.save(Progress(1, 0, 12), kind="preempted", wait=True)
    if RANK == 1:
        sharded.StagedShard.write = good  # type: ignore[method-assign]
    run.train(2)
    then = run.snapshots.save(Progress(2, 0, 24), kind="final", wait=True)
    run.snapshots.close()
    return [bad, then, [event.message for event in run.events]]


def the_disk_of_one_rank_hangs(out: Path) -> Any:
    """Rank 1 is still writing its part of step 2 when rank 0 has given it up, and until step 6 is done."""
    run = Run(out / "hung", attempt=0, save_timeout=2)
    run.resume()
    write, released = sharded.StagedShard.write, threading.Event()
    written: list[bool] = []

    def late(self: sharded.StagedShard, directory: Path, disk: Disk) -> None:
        before = self.data.numpy().tobytes()
        assert released.wait(60)
        written.append(self.data.numpy().tobytes() == before)
        write(self, directory, disk)

    if RANK == 1:
        sharded.StagedShard.write = late  # type: ignore[method-assign]
    run.train(2)
    if RANK == 0:
        assert run.snapshots._saver is not None
        assert run.snapshots._saver._writer.wait(60)
    dist.barrier()
    started = time.monotonic()
    run.train(6)
    seconds = time.monotonic() - started
    released.set()
    run.snapshots.close()
    dist.barrier()
    sharded.StagedShard.write = write  # type: ignore[method-assign]
    run.train(8)
    then = run.snapshots.save(Progress(8, 0, 96), wait=True)
    run.train(9)
    last = run.snapshots.save(Progress(9, 0, 108), kind="final", wait=True)
    run.snapshots.close()
    events = [(event.step, event.result, event.message) for event in run.events]
    return {"seconds": seconds, "intact": written, "saved": [then, last], "events": events}


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


class Stage:
    """A pipeline stage: a state that only this rank has, under a name that only it uses."""

    def __init__(self, rank: int, fill: float) -> None:
        self.rank = rank
        self.tensor = torch.full((3,), fill)

    def state_dict(self) -> dict[str, Any]:
        return {f"layer{self.rank}.weight": self.tensor, "stage": self.rank}

    def load_state_dict(self, state: Any) -> None:
        self.tensor = state[f"layer{self.rank}.weight"]
        assert state["stage"] == self.rank


def stages(out: Path, attempt: int, fill: float) -> tuple[Stage, Snapshots]:
    stage = Stage(RANK, fill)
    snapshots = Snapshots(
        out / "pipeline",
        {"model": stage},
        sharded=("model",),
        every=SaveInterval.parse("1steps"),
        keep=9,
        identity=Identity("digits", "uid-1", 1, attempt, RANK, WORLD_SIZE),
        strategy="pipeline",
        global_batch=8,
    )
    return stage, snapshots


def pipeline(out: Path) -> Any:
    """Each rank gets its own stage back."""
    _, snapshots = stages(out, attempt=0, fill=RANK + 0.5)
    snapshots.resume()
    snapshots.save(Progress(1, 0, 8), kind="final", wait=True)
    snapshots.close()
    stage, snapshots = stages(out, attempt=1, fill=-1.0)
    snapshots.resume()
    return stage.tensor.tolist()


def pipeline_retyped(out: Path) -> Any:
    """A stage that has become whole numbers cannot hold what was saved."""
    try:
        stages(out, attempt=3, fill=-1)[1].resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def pipeline_resized(out: Path) -> Any:
    """Stages of two ranks make no sense to one."""
    try:
        stages(out, attempt=4, fill=-1.0)[1].resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        save,
        resume,
        own_loaders,
        own_loaders_resumed,
        own_loaders_broken,
        branched_unbroken,
        branched_first,
        branched_second,
        branched_third,
        one_rank_cannot_write,
        the_disk_of_one_rank_hangs,
        pipeline,
        pipeline_retyped,
        pipeline_resized,
    )
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name in names:
        seen = SCENARIOS[name](out)
        (out / f"{name}-{WORLD_SIZE}-{RANK}.json").write_text(json.dumps(seen))
        dist.barrier()
    # All is written. Taking down the groups of so many meshes at once is gloo's business, and has aborted a process.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
