"""Two ranks under torchrun write checkpoints; each rank writes what it saw to OUT/rank-<r>.json.

Run as `torchrun … checkpoint_ranks.py OUT`. A scenario is a function that returns something JSON can hold.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ddp_trainer.snapshots import checkpoints as module
from ddp_trainer.snapshots.checkpoints import Checkpoints
from ddp_trainer.snapshots.session import SaveInterval, Snapshots
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.values import Identity, Progress, SnapshotEvent

RANK = int(os.environ["RANK"])


def identity(attempt: int = 0) -> Identity:
    return Identity("digits", "uid-1", 1, attempt, RANK, 2)


def opened(
    directory: Path, *, attempt: int = 0, keep: int = 2, timeout: float = 120, events: list[SnapshotEvent] | None = None
) -> Checkpoints:
    on_event = None if events is None else events.append
    return Checkpoints(directory, keep=keep, identity=identity(attempt), on_event=on_event, timeout=timeout)


def at(step: int) -> Progress:
    return Progress(step, 0, step * 16)


def save(checkpoints: Checkpoints, step: int) -> None:
    """Each rank its own file, one of them in a folder that rank 0 makes, as scripts do."""
    with checkpoints.writing(at(step)) as folder:
        if RANK == 0:
            (folder / "parts").mkdir()
        dist.barrier()
        torch.save({"rank": RANK, "step": step}, folder / "parts" / f"rank-{RANK}.pt")


def found(checkpoints: Checkpoints) -> str | None:
    newest = checkpoints.newest()
    return None if newest is None else newest[1].name


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "attempts")


def error_of(action: Callable[[], Any]) -> list[str] | None:
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def what_all_ranks_wrote_is_one_checkpoint(volume: Path) -> Any:
    events: list[SnapshotEvent] = []
    checkpoints = opened(volume, events=events)
    before = found(checkpoints)
    summed: list[str] = []
    sums = module.sums
    module.sums = lambda folder, files, disk: sums(folder, summed.extend(chosen := list(files)) or chosen, disk)
    try:
        save(checkpoints, 3)
    finally:
        module.sums = sums
    newest = checkpoints.newest()
    assert newest is not None
    manifest, folder = newest
    loaded = torch.load(folder / "parts" / f"rank-{RANK}.pt")
    return {
        "before": before,
        "found": folder.name,
        "files": sorted(manifest.files),
        "summed": summed,
        "loaded": loaded,
        "events": [[event.result, event.step] for event in events],
    }


def an_exception_in_the_block_of_one_rank(volume: Path) -> Any:
    events: list[SnapshotEvent] = []
    checkpoints = opened(volume, events=events)
    save(checkpoints, 1)

    def fails() -> None:
        with checkpoints.writing(at(2)) as folder:
            (folder / f"half-{RANK}").write_bytes(b"half")
            if RANK == 1:
                raise ValueError("the disk of this node is broken")

    error = error_of(fails)
    dist.barrier()
    left = names(volume)
    save(checkpoints, 4)
    return {"error": error, "left": left, "then": found(checkpoints), "events": [event.result for event in events]}


def a_damaged_file(volume: Path) -> Any:
    events: list[SnapshotEvent] = []
    checkpoints = opened(volume, events=events)
    save(checkpoints, 1)
    save(checkpoints, 2)
    if RANK == 0:
        file = volume / "checkpoint-000000000002" / "parts" / "rank-1.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    again = found(opened(volume, attempt=1, events=events))
    return {"found": again, "names": names(volume), "events": [[event.result, event.step] for event in events]}


def an_attempt_that_was_replaced(volume: Path) -> Any:
    checkpoints = opened(volume)
    save(checkpoints, 1)

    def replaced_meanwhile() -> None:
        with checkpoints.writing(at(2)) as folder:
            (folder / f"rank-{RANK}").write_bytes(b"data")
            dist.barrier()
            if RANK == 0:
                Fence.acquire(volume, created=1, attempt=1, uid="uid-1")

    during = error_of(replaced_meanwhile)
    after = error_of(lambda: save(checkpoints, 3))
    asking = error_of(checkpoints.newest)
    return {"during": during, "after": after, "asking": asking, "names": names(volume)}


def checkpoints_and_snapshots_are_kept_side_by_side(volume: Path) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    snapshots = Snapshots(
        volume,
        {"model": model},
        every=SaveInterval.parse("1steps"),
        keep=3,
        identity=identity(),
        strategy="own",
        global_batch=16,
    )
    snapshots.resume()
    checkpoints = opened(volume, keep=2)
    for step in range(1, 6):
        snapshots.save(at(step), wait=True)
        save(checkpoints, step * 10)
    snapshots.close()
    dist.barrier()
    kept = names(volume)
    dist.barrier()
    (volume / ".tmp-step-000000000009-0-1").mkdir(exist_ok=True)  # of a snapshot that is being written
    dist.barrier()
    newest = found(checkpoints)
    return {"kept": kept, "newest": newest, "left": names(volume)}


def a_rank_that_reads_otherwise_sets_nothing_aside(volume: Path) -> Any:
    checkpoints = opened(volume)
    save(checkpoints, 1)
    verify = module.verify_files

    def misread(directory: Path, manifest: Any) -> None:
        raise CorruptSnapshotError("parts/rank-1.pt is missing")

    if RANK == 1:
        module.verify_files = misread
    try:
        error = error_of(checkpoints.newest)
    finally:
        module.verify_files = verify
    return {"error": error, "names": names(volume)}


def blocks_that_cannot_be_committed(volume: Path) -> Any:
    checkpoints = opened(volume)

    def empty() -> None:
        with checkpoints.writing(at(1)):
            pass

    def takes_our_name() -> None:
        with checkpoints.writing(at(1)) as folder:
            (folder / "manifest.json").write_text("{}")

    def links() -> None:
        with checkpoints.writing(at(1)) as folder:
            if RANK == 0:
                (folder / "model.pt").symlink_to("/etc/hostname")

    def twice() -> None:
        with checkpoints.writing(at(1)):
            checkpoints.newest()

    def leaves_dcp_at_work() -> None:
        with checkpoints.writing(at(1)) as folder:
            (folder / f"__{RANK}_0.distcp").write_bytes(b"data")

    def leaves_a_thread_at_work() -> None:
        sums = module.sums
        with checkpoints.writing(at(1)) as folder:
            (folder / f"{RANK}.pt").write_bytes(b"data")

            def writes_on(folder: Path, names: Any, disk: Any) -> Any:
                module.sums = sums
                entries = sums(folder, names, disk)
                (folder / f"{RANK}.pt").write_bytes(b"more data")
                return entries

            module.sums = writes_on  # as late as a background thread can be seen

    actions = (empty, takes_our_name, links, twice, leaves_dcp_at_work, leaves_a_thread_at_work)
    errors = [error_of(action) for action in actions]
    dist.barrier()
    return {"errors": errors, "names": names(volume)}


def what_dcp_saved_is_loaded_by_dcp(volume: Path) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    checkpoints = opened(volume)
    with checkpoints.writing(at(1)) as folder:
        dcp.save(state, checkpoint_id=folder)
    newest = checkpoints.newest()
    assert newest is not None
    loaded = {"weight": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=newest[1])
    return {"files": len(newest[0].files), "local": loaded["weight"].to_local().tolist()}


def a_rank_that_never_comes(volume: Path) -> Any:
    checkpoints = opened(volume, timeout=5)
    save(checkpoints, 1)

    def alone() -> None:
        if RANK == 0:
            with checkpoints.writing(at(2)) as folder:
                (folder / "model.pt").write_bytes(b"data")

    error = error_of(alone)
    dist.barrier()
    return {"error": error, "names": [name for name in names(volume) if not name.startswith(".tmp-")]}


SCENARIOS: tuple[Callable[[Path], Any], ...] = (
    what_all_ranks_wrote_is_one_checkpoint,
    an_exception_in_the_block_of_one_rank,
    a_damaged_file,
    an_attempt_that_was_replaced,
    checkpoints_and_snapshots_are_kept_side_by_side,
    a_rank_that_reads_otherwise_sets_nothing_aside,
    blocks_that_cannot_be_committed,
    what_dcp_saved_is_loaded_by_dcp,
    a_rank_that_never_comes,
)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    seen = {}
    for scenario in SCENARIOS:
        volume = out / scenario.__name__ / "digits"
        dist.barrier()
        seen[scenario.__name__] = scenario(volume)
        dist.barrier()
    (out / f"rank-{RANK}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
