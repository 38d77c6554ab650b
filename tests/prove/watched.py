"""The trainer, watched from inside its ranks: it notes what each step trains on, or all die at one exact moment.

    WATCH='{"notes": "DIR", "kill": {"point": "save", "step": 15, "part": 3, "rank": 0}}' torchrun watched.py …

This is `ddp_trainer.train` itself. Only the loop that it builds is observed: where it is about to do what `kill` says,
the rank writes down where it stands and sends SIGKILL to every rank, itself last. Nothing of it waits for a time, so a
moment is the same one on any machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import ddp_trainer.train.build
from ddp_trainer.contract.processes import children, send
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.train import __main__ as train
from ddp_trainer.train.data import StepBatch
from ddp_trainer.train.loop import TrainingLoop

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ["DDPJOB_ATTEMPT"])
KILLED = "killed.json"


class Notes:
    """A line a step and rank: the samples that counted, and the learning rate they were trained with.

    For tasks whose batches end with the numbers of their samples. A line is with the kernel before the step begins, so
    it outlives the process.
    """

    def __init__(self, folder: Path, loop: TrainingLoop) -> None:
        self._file = (folder / f"attempt-{ATTEMPT}-rank-{RANK}.jsonl").open("a")
        self._loop = loop
        self._train = loop.strategy.forward_backward
        loop.strategy.forward_backward = self._noted  # type: ignore[method-assign]

    def _noted(self, batch: StepBatch) -> Any:
        samples = [number for part in batch.micro_batches for number in part.batch[-1][: part.count].tolist()]
        rate = self._loop.optimizer.param_groups[0]["lr"]
        self._file.write(json.dumps({"step": self._loop.step + 1, "samples": samples, "lr": rate}) + "\n")
        self._file.flush()
        return self._train(batch)


class Kill:
    """SIGKILL for all ranks at `point` of `step`, for the `part`-th time that this rank comes by there in that step."""

    def __init__(self, folder: Path, loop: TrainingLoop, *, point: str, step: int, part: int, rank: int) -> None:
        self._folder = folder
        self._loop = loop
        self._step = step
        self._part = part
        self._seen = 0
        if rank == RANK:
            {
                "before update": self._at_update,
                "after update": self._at_update,
                "micro-batch": self._at_micro_batch,
                "validation": self._at_validation,
                "save": self._at_save,
            }[point](point)

    def _at_update(self, point: str) -> None:
        optimizer = self._loop.optimizer
        hook = optimizer.register_step_pre_hook if point == "before update" else optimizer.register_step_post_hook
        hook(lambda *_: self._comes_by(self._loop.step + 1, f"{point.split()[0]} the optimizer's update"))

    def _at_micro_batch(self, point: str) -> None:
        strategy = self._loop.strategy
        strategy.micro_step = self._before(  # type: ignore[method-assign]
            strategy.micro_step, lambda: self._comes_by(self._loop.step + 1, f"before micro-batch {self._part + 1}")
        )

    def _at_validation(self, point: str) -> None:
        strategy = self._loop.strategy
        strategy.predict = self._before(  # type: ignore[method-assign]
            strategy.predict, lambda: self._comes_by(self._loop.step, f"before batch {self._part + 1}")
        )

    def _at_save(self, point: str) -> None:
        """At a file operation of this snapshot, whichever thread makes it; a write is left half done."""
        for name in ("make_directory", "create", "fsync", "rename"):
            setattr(Disk, name, self._on_disk(name, getattr(Disk, name)))
        write, sync = Disk.write, Disk.sync

        def synced(disk: Disk, descriptor: int) -> None:
            self._on_path("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
            sync(disk, descriptor)

        def torn(disk: Disk, descriptor: int, view: memoryview) -> int:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if self._is_of_step(path) and self._seen == self._part:
                write(disk, descriptor, view[: len(view) // 2])
            self._on_path("write", path)
            return write(disk, descriptor, view)

        Disk.write = torn  # type: ignore[assignment,method-assign]
        Disk.sync = synced  # type: ignore[method-assign]

    def _on_disk(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(disk: Disk, path: Path, *rest: Any) -> Any:
            self._on_path(name, path)
            return act(disk, path, *rest)

        return acted

    def _on_path(self, operation: str, path: Path) -> None:
        if self._is_of_step(path):
            what = {"write": "half of the write", "make_directory": "creation"}.get(operation, operation)
            # a temporary name has the process's number in it
            name = "the snapshot's directory" if f"step-{self._step:012d}" in path.name else path.name
            self._comes_by(self._step, f"{what} of {name}")

    def _is_of_step(self, path: Path) -> bool:
        return f"step-{self._step:012d}" in str(path)

    def _before(self, act: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
        def both(*arguments: Any) -> Any:
            first()
            return act(*arguments)

        return both

    def _comes_by(self, step: int, where: str) -> None:
        if step != self._step:
            return
        self._seen += 1
        if self._seen > self._part:
            self._kill(where)

    def _kill(self, where: str) -> NoReturn:
        stands = {"rank": RANK, "step": self._step, "where": where}
        (self._folder / KILLED).write_text(json.dumps(stands))
        # torchrun's children are the ranks; without torchrun there is only this one
        ranks = children(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else []
        send([pid for pid in ranks if pid != os.getpid()], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL cannot be survived")


def main() -> int:
    watch = json.loads(os.environ["WATCH"])
    folder = Path(watch["notes"])
    build = ddp_trainer.train.build.build

    def watched(*arguments: Any) -> TrainingLoop:
        loop = build(*arguments)
        if watch.get("samples"):
            Notes(folder, loop)
        if watch.get("kill"):
            Kill(folder, loop, **watch["kill"])
        return loop

    ddp_trainer.train.build.build = watched  # type: ignore[assignment]
    return train.exit_code(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
