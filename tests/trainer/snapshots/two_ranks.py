"""Two ranks under torchrun live through several scenarios; each rank writes what it saw to OUT/rank-<r>.json.

Run as `torchrun … two_ranks.py OUT`. A scenario is a function that returns something JSON can hold. One start for
all of them: it takes longer than they do.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.fence import Fence

RANK = int(os.environ["RANK"])


class BrokenBatch(Exception):
    """What one rank alone stumbles over."""


class Run:
    """DistributedDataParallel with dropout: each rank draws its own random numbers."""

    def __init__(
        self,
        directory: Path,
        *,
        attempt: int = 0,
        every: str | SaveInterval = "2steps",
        seed: int = 0,
        states: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        torch.manual_seed(seed + 1 + RANK)
        random.seed(RANK)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.events: list[SnapshotEvent] = []
        self.losses: list[float] = []
        self.step = 0
        self.snapshots = Snapshots(
            directory,
            {"model": self.ddp, "optimizer": self.optimizer, **states},
            every=SaveInterval.parse(every) if isinstance(every, str) else every,
            keep=9,
            identity=Identity("digits", "uid-1", 1, attempt, RANK, 2),
            strategy="ddp",
            global_batch=16,
            on_event=self.events.append,
        )

    def resume(self) -> int | None:
        manifest = self.snapshots.resume()
        self.step = manifest.step if manifest else 0
        return manifest.step if manifest else None

    def train(self, until: int, pause: float = 0.0, fails: int | None = None) -> None:
        """Train to step `until`; in it, rank `fails` raises between forward and backward."""
        while self.step < until:
            self.optimizer.zero_grad()
            loss = self.ddp(torch.randn(8, 8)).square().mean() * random.random()
            if fails == RANK and self.step == until - 1:
                raise BrokenBatch
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.losses.append(loss.item())
            time.sleep(pause)
            self.snapshots.step_end(Progress(self.step, 0, self.step * 16))

    def weights(self) -> list[float]:
        return [value for tensor in self.model.state_dict().values() for value in tensor.flatten().tolist()]


def in_turn() -> None:
    """All ranks here before any goes on: for what the test does to the files, not for the snapshots."""
    dist.barrier()


def resume_is_bitwise(volume: Path) -> Any:
    unbroken = Run(volume / "unbroken")
    unbroken.resume()
    unbroken.train(7)
    unbroken.snapshots.close()
    broken = Run(volume / "broken")
    broken.resume()
    broken.train(5)
    broken.snapshots.close()
    in_turn()
    resumed = Run(volume / "broken", attempt=1, seed=50)
    step = resumed.resume()
    resumed.train(7)
    resumed.snapshots.close()
    return {
        "step": step,
        "losses": [unbroken.losses, broken.losses[:4] + resumed.losses],
        "weights": [unbroken.weights(), resumed.weights()],
    }


def only_one_rank_has_a_state(volume: Path) -> Any:
    said = []
    for rank in (0, 1):
        average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
        try:
            Run(volume, states={"ema": average} if rank == RANK else {}).resume()
        except UserError as error:
            said.append(str(error))
    return said


def only_one_rank_has_an_obstacle(volume: Path) -> Any:
    class WithExtraState(torch.nn.Linear):
        def get_extra_state(self) -> int:
            return 0

        def set_extra_state(self, state: int) -> None: ...

    run = Run(volume, states={"ema": (torch.nn.Linear, WithExtraState)[RANK](2, 2)})
    run.resume()
    run.train(3)
    run.snapshots.close()
    return run.snapshots.emergency(BrokenBatch()), [event.message for event in run.events]


def only_rank_0_sees_the_snapshot(volume: Path) -> Any:
    run = Run(volume)
    run.resume()
    run.train(2)
    run.snapshots.close()
    in_turn()
    mine = volume if RANK == 0 else volume.with_name("nothing-here")
    resumed = Run(mine, attempt=1, seed=50)
    return {"step": resumed.resume(), "weights": [run.weights(), resumed.weights()]}


def rank_1_reads_other_bytes(volume: Path) -> Any:
    run = Run(volume)
    run.resume()
    run.train(2)
    run.snapshots.close()
    in_turn()
    mine = volume
    if RANK == 1:
        mine = volume.with_name("stale")
        shutil.copytree(volume, mine)
        path = mine / "step-000000000002" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"bad!")
    in_turn()
    resumed = Run(mine, attempt=1, seed=50)
    return {"step": resumed.resume(), "weights": [run.weights(), resumed.weights()]}


def rank_0_is_fenced(volume: Path) -> Any:
    if RANK == 0:
        volume.mkdir()
        Fence.acquire(volume, created=1, attempt=5, uid="uid-1")
    in_turn()
    try:
        Run(volume, attempt=4).resume()
    except FencedError as error:
        return str(error)
    return None


def the_program_has_changed_on_one_rank(volume: Path) -> Any:
    run = Run(volume)
    run.resume()
    run.train(2)
    run.snapshots.close()
    in_turn()
    other = Run(volume, attempt=1)
    if RANK == 1:
        other.snapshots._stateful["model"] = torch.nn.Linear(2, 2)
    try:
        other.resume()
    except Exception as error:
        return [type(error).__name__, getattr(error, "exit_code", None), str(error)]
    return None


class BrokenDisk(Disk):
    def create(self, path: Path, chunks: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def every_rank_learns_whether_a_waited_for_save_succeeded(volume: Path) -> Any:
    run = Run(volume, every="100steps")
    run.resume()
    run.train(1)
    good = run.snapshots.save(Progress(1, 0, 16), kind="preempted", wait=True)
    if RANK == 0:
        run.snapshots._saver._store.disk = BrokenDisk()  # type: ignore[union-attr]
    run.train(2)
    bad = run.snapshots.save(Progress(2, 0, 32), kind="preempted", wait=True)
    run.train(3)
    if RANK == 0:
        Fence.acquire(volume, created=1, attempt=1, uid="uid-1")
    in_turn()
    try:
        run.snapshots.save(Progress(3, 0, 48), kind="preempted", wait=True)
    except FencedError as error:
        return [good, bad, str(error)]
    return [good, bad, None]


def timed_saves_happen_at_one_step_on_all_ranks(volume: Path) -> Any:
    run = Run(volume, every="1seconds")
    run.resume()
    saved: list[int] = []
    save = run.snapshots.save
    run.snapshots.save = lambda progress, **kw: saved.append(progress.step) or save(progress, **kw)  # type: ignore[method-assign,func-returns-value]
    run.train(120, pause=0.01 * (1 + RANK))
    run.snapshots.close()
    return saved


def train_and_save_as_two(volume: Path) -> Any:
    run = Run(volume)
    run.resume()
    run.train(2)
    run.snapshots.close()
    return run.weights()


def resume_what_one_rank_saved(volume: Path) -> Any:
    run = Run(volume, attempt=1, seed=50)
    step = run.resume()
    return [step, run.weights(), torch.rand(3).tolist(), [event.message for event in run.events]]


def auto_chooses_its_interval_from_stall_and_history(volume: Path) -> Any:
    if RANK == 0:
        volume.mkdir()
        for attempt in (0, 1):
            Fence.acquire(volume, created=1, attempt=attempt, uid="uid-1")
    in_turn()
    assert SaveInterval.parse("auto") == SaveInterval(60, "auto")
    # A first interval that a test can wait for; the rest is auto's own choice.
    run = Run(volume, attempt=2, every=SaveInterval(1, "auto"))
    run.resume()
    saved: list[int] = []
    save = run.snapshots.save
    run.snapshots.save = lambda progress, **kw: saved.append(progress.step) or save(progress, **kw)  # type: ignore[method-assign,func-returns-value]
    while not saved:
        run.train(run.step + 1, pause=0.02)
    if run.snapshots._saver is not None:
        run.snapshots._saver._writer.wait(60)  # from the next step on it is known what it cost
    # longer than the interval was, and much shorter than it can be now, also on a machine that is busy
    run.train(run.step + 20, pause=0.1)
    run.snapshots.close()
    chosen = [asdict(event.interval) for event in run.events if event.interval is not None]
    return {"saved": saved, "chosen": chosen, "interval": run.snapshots._schedule._timetable.seconds}


def meet_again(store: Path) -> None:
    """Drop all connections, as the end of the process would, and set up new ones, as the next attempt does."""
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=RANK, world_size=2, timeout=timedelta(seconds=120)
    )


def an_exception_on_one_rank_leaves_an_emergency_snapshot(volume: Path) -> Any:
    """First rank 1 fails, in step 5, then rank 0, in step 8; compared with a run in which nobody does."""
    unbroken = Run(volume.with_name("unbroken"), every="3steps")
    unbroken.resume()
    unbroken.train(10)
    unbroken.snapshots.close()
    resumed, raised, messages = [], [], []
    for attempt, fails in enumerate((1, 0, None)):
        run = Run(volume, attempt=attempt, every="3steps", seed=50 * attempt)
        resumed.append(run.resume())
        if fails is not None:
            # for the rank that does not fail; meeting again keeps its patience, as it comes after that wait
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
        try:
            run.train((5, 8, 10)[attempt], fails=fails)
        except Exception as error:
            raised.append(type(error).__name__)
            run.snapshots.emergency(error)
            meet_again(volume.with_name(f"store-{attempt}"))
        run.snapshots.close()
        messages += [event.message for event in run.events]
        in_turn()
    return {
        "resumed": resumed,
        "raised": raised,
        "messages": messages,
        "losses": [unbroken.losses[7:], run.losses],
        "weights": [unbroken.weights(), run.weights()],
    }


SCENARIOS: tuple[Callable[[Path], Any], ...] = (
    resume_is_bitwise,
    only_one_rank_has_a_state,
    only_one_rank_has_an_obstacle,
    only_rank_0_sees_the_snapshot,
    rank_1_reads_other_bytes,
    rank_0_is_fenced,
    the_program_has_changed_on_one_rank,
    every_rank_learns_whether_a_waited_for_save_succeeded,
    timed_saves_happen_at_one_step_on_all_ranks,
    train_and_save_as_two,
    resume_what_one_rank_saved,
    auto_chooses_its_interval_from_stall_and_history,
    an_exception_on_one_rank_leaves_an_emergency_snapshot,
)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    # A deadlock must fail the scenario, not the machine's patience.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    seen = {}
    for scenario in SCENARIOS:
        volume = out / scenario.__name__
        if RANK == 0:
            volume.mkdir(exist_ok=True)
        in_turn()
        seen[scenario.__name__] = scenario(volume / "digits")
        in_turn()
    (out / f"rank-{RANK}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
