"""Ranks under torchrun that hold a model in parts; what happens to their snapshots.

Run as `torchrun --nproc-per-node=N sharded_ranks.py OUT SCENARIO…` (scenarios.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from scenarios import RANK, WORLD_SIZE, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_trainer.contract.outcomes import classify
from ddp_trainer.snapshots import rounds, shard_storage, sharded
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.sharded import ShardedOptimizer
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest


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
    def create(self, path: Path, chunks: Any) -> NoReturn:
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


class QuotaDisk(Disk):
    """Takes no file of a snapshot beside so many others. What is free does not show it, as with quotas over NFS."""

    def __init__(self, others: int) -> None:
        self.others = others

    def create(self, path: Path, chunks: Any) -> FileEntry:
        if len(list(path.parents[2].glob("step-*"))) > self.others:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().create(path, chunks)


def the_quota_of_one_rank_is_used_up(out: Path) -> Any:
    """There is room beside one snapshot at step 5, and beside none at step 6."""
    run = Run(out / "quota", attempt=0)
    run.resume()
    if RANK == 0:
        run.snapshots._store.keep = 2  # type: ignore[union-attr]
    run.train(5)
    write, others = sharded.StagedShard.write, 1
    if RANK == 1:
        sharded.StagedShard.write = lambda self, directory, _: write(self, directory, QuotaDisk(others))  # type: ignore[method-assign]
    saved = run.snapshots.save(Progress(5, 0, 60), kind="preempted", wait=True)
    others = 0
    run.train(6)
    run.snapshots.close()
    sharded.StagedShard.write = write  # type: ignore[method-assign]
    return [saved, [event.message for event in run.events]]


def one_rank_loses_what_it_wrote(out: Path) -> Any:
    """The volume took the bytes of rank 1, and has zeros in their place by the time that rank 0 looks."""
    run = Run(out / "lost", attempt=0)
    run.resume()
    run.train(1)
    write = sharded.StagedShard.write

    def lost(self: sharded.StagedShard, directory: Path, disk: Disk) -> dict[str, FileEntry]:
        files = write(self, directory, disk)
        path = directory / "shards" / "rank-00001.safetensors"
        size = path.stat().st_size
        for length in (0, size):
            os.truncate(path, length)
        return files

    if RANK == 1:
        sharded.StagedShard.write = lost  # type: ignore[method-assign]
    bad = run.snapshots.save(Progress(1, 0, 12), kind="preempted", wait=True)
    sharded.StagedShard.write = write  # type: ignore[method-assign]
    run.train(2)
    then = run.snapshots.save(Progress(2, 0, 24), kind="final", wait=True)
    run.snapshots.close()
    return [bad, then, [event.message for event in run.events]]


def the_disk_of_one_rank_hangs(out: Path) -> Any:
    """Rank 1 is still writing its part of step 2 when rank 0 has given it up, and until step 6 is done."""
    run = Run(out / "hung", attempt=0, save_timeout=6)
    run.resume()
    write, released = sharded.StagedShard.write, threading.Event()
    written: list[bool] = []

    def late(self: sharded.StagedShard, directory: Path, disk: Disk) -> dict[str, FileEntry]:
        before = self.data.numpy().tobytes()
        assert released.wait(60)
        written.append(self.data.numpy().tobytes() == before)
        return write(self, directory, disk)

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


class LopsidedModel(torch.nn.Sequential):
    """Its running statistics, which rank 0 saves, are the most of it."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(5, 3))
        self.register_buffer("statistics", torch.zeros(10_000))


def rank_0_writes_most(out: Path) -> Any:
    """What the store of rank 0, and the other rank, are to wait for and have room for."""
    run = Run(out / "lopsided", attempt=0, model=LopsidedModel)
    run.resume()
    expected: list[int] = []
    if RANK == 0:
        store = run.snapshots._store
        assert store is not None
        save = store.save

        def record(write: Any, manifest: Manifest, *, expected_bytes: int) -> Manifest:
            expected.append(expected_bytes)
            return save(write, manifest, expected_bytes=expected_bytes)

        store.save = record  # type: ignore[method-assign, assignment]
    run.train(2)
    run.snapshots.close()
    assert run.snapshots._saver is not None
    return {"expected": expected, "in_flight": run.snapshots._saver._bytes_in_flight}


class SlowDisk(Disk):
    def rename(self, source: Path, target: Path) -> None:
        time.sleep(8)
        super().rename(source, target)


def rank_0_takes_long(out: Path) -> Any:
    """Rank 1 has written its part, and does not hear for longer than a save may take that it is over."""
    run = Run(out / "slow", attempt=0, save_timeout=4)
    run.resume()
    if RANK == 0:
        run.snapshots._store.disk = SlowDisk()  # type: ignore[union-attr]
    run.train(2)
    if RANK == 0:
        assert run.snapshots._saver is not None
        assert run.snapshots._saver._writer.wait(60)
    dist.barrier()
    run.train(3)
    return [(event.step, event.result, event.message) for event in run.events]


def rank_0_reads_for_long(out: Path) -> Any:
    """What rank 1 has written: for longer than a collective of the writing threads may take."""
    run = Run(out / "read", attempt=0, save_timeout=6)
    run.resume()
    read, shards = sharded.read_back, run.snapshots._shards
    assert shards is not None
    group = shards._writers.group

    def slowly(file: Any) -> FileEntry:
        time.sleep(8)
        return read(file)

    sharded.read_back, rounds.ROUND_SECONDS = slowly, 0.5  # type: ignore[misc]
    run.train(2)
    assert run.snapshots._saver is not None
    assert run.snapshots._saver._writer.wait(60)
    sharded.read_back = read
    dist.barrier()
    is_lost = shards._are_lost
    run.train(4)
    run.snapshots.close()
    return {"is_lost": is_lost, "same_group": shards._writers.group is group, "events": [e.result for e in run.events]}


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


def pipeline_grown(out: Path) -> Any:
    """A new module has a tensor of another size than one that has trained, as an extra state may be."""
    stage, snapshots = stages(out, attempt=2, fill=-1.0)
    stage.tensor = torch.empty(0)
    snapshots.resume()
    return stage.tensor.tolist()


def pipeline_retyped(out: Path) -> Any:
    """A stage that has become whole numbers cannot hold what was saved."""
    try:
        stages(out, attempt=3, fill=-1)[1].resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def the_index_cannot_be_read_on_one_rank(out: Path, *, times: int = 99) -> Any:
    """The volume answers rank 1 with errors, so often."""
    read, left = shard_storage.read_file, [times]

    def broken(directory: Path, manifest: Manifest, name: str) -> bytearray:
        if name == shard_storage.INDEX and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(directory, manifest, name)

    if RANK == 1:
        shard_storage.read_file = broken
    try:
        stages(out, attempt=3, fill=-1.0)[1].resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        shard_storage.read_file = read
    return None


class Deeper(torch.nn.Sequential):
    """The model of `save` with another layer."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(5, 7), torch.nn.Dropout(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))


def another_layer(out: Path) -> Any:
    """The program has a layer that the snapshot has not."""
    try:
        Run(out / "fsdp-copy", attempt=WORLD_SIZE, model=Deeper).resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def the_gpu_of_one_rank_fails(out: Path) -> Any:
    """While the parts of rank 1 are copied to it."""
    read = shard_storage.read_tensors

    def broken(*_: Any) -> NoReturn:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    if RANK == 1:
        shard_storage.read_tensors = broken
    try:
        stages(out, attempt=3, fill=-1.0)[1].resume()
    except Exception as error:
        return [classify(error)[1], str(error)]
    finally:
        shard_storage.read_tensors = read
    return None


def the_index_cannot_be_read_at_first(out: Path) -> Any:
    """Nor may one rank go on to the next collective alone."""
    return the_index_cannot_be_read_on_one_rank(out, times=1)


def pipeline_resized(out: Path) -> Any:
    """Stages of two ranks make no sense to one."""
    try:
        stages(out, attempt=4, fill=-1.0)[1].resume()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


SCENARIOS = (
    save,
    resume,
    branched_unbroken,
    branched_first,
    branched_second,
    branched_third,
    one_rank_cannot_write,
    the_quota_of_one_rank_is_used_up,
    one_rank_loses_what_it_wrote,
    the_disk_of_one_rank_hangs,
    rank_0_writes_most,
    rank_0_takes_long,
    rank_0_reads_for_long,
    pipeline,
    pipeline_grown,
    pipeline_retyped,
    the_index_cannot_be_read_on_one_rank,
    the_index_cannot_be_read_at_first,
    another_layer,
    the_gpu_of_one_rank_fails,
    pipeline_resized,
)


if __name__ == "__main__":
    run(SCENARIOS)
