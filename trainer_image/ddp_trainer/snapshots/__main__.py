"""List, verify, export, restore and remove snapshots.

python -m ddp_trainer.snapshots ls DIR          list snapshots, newest first, then checkpoints of the program's own
python -m ddp_trainer.snapshots verify DIR      verify checksums; exit code 1 if any does not match its manifest
python -m ddp_trainer.snapshots export DIR      write the newest valid model as model.pt and model.safetensors
python -m ddp_trainer.snapshots restore DIR --step N
                                                have the next attempt begin from the snapshot of this step
python -m ddp_trainer.snapshots rm DIR --step N remove the snapshots of these steps

DIR is a checkpoint directory, such as /mnt/shared/checkpoints/digits. Only restore and rm change it, neither while the
job runs, and only export needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from ddp_trainer.snapshots.trust import restore
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import SnapshotInfo
from ddp_trainer.snapshots.trust.names import CORRUPT, TEMPORARY, Series, step_directory
from ddp_trainer.snapshots.trust.store import SnapshotStore


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    if not options.directory.is_dir():
        print(f"{options.directory} is not a directory: name the job's, such as /mnt/shared/checkpoints/digits")
        return 2
    stores = [SnapshotStore(options.directory, keep=1, fence=None, series=series) for series in get_args(Series)]
    try:
        if options.command == "ls":
            return _ls_as_json(stores) if options.json else _ls(stores)
        if options.command == "verify":
            return _verify(stores, options.step)
        if options.command == "rm":
            return _remove(stores, options.step)
        if options.command == "restore":
            return _restore(options.directory, options.step)
        step, files = _export(stores[0], options.step, options.state, options.to)
        if options.hold:
            _hold(step, files, options.hold)
        else:
            print(f"step {step}: wrote {' and '.join(map(str, files))}")
        return 0
    except (SnapshotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _ls(stores: Sequence[SnapshotStore]) -> int:
    infos = [(store.series, info) for store in stores for info in store.list()]
    directory = stores[0].directory
    if not infos:
        print(f"no snapshot in {directory}")
    for series, info in infos:
        print(_line(series, info))
    for path in restore.aside_in(directory):
        kind, step = path.name.split("-")
        print(f"{kind} {int(step):>10}  set aside by a restore, {path.parent.relative_to(directory)}")
    if (request := restore.asked(directory)) is not None:
        print(f"the next attempt is asked to begin from step {request.step}")
    return 0


def _ls_as_json(stores: Sequence[SnapshotStore]) -> int:
    """One object a line, in the same order (docs/contracts.md section 6)."""
    for series, info in ((store.series, info) for store in stores for info in store.list()):
        time_or_none = None if info.time is None else _utc(info.time)
        found = {"series": series, "step": info.step, "time": time_or_none, "kind": info.kind, "bytes": info.bytes}
        print(json.dumps(found | {"lossIsFinite": info.loss_is_finite, "problem": info.problem, "setAside": False}))
    for path in restore.aside_in(stores[0].directory):
        kind, step = path.name.split("-")
        print(json.dumps({"series": kind, "step": int(step), "setAside": True}))
    return 0


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _verify(stores: Sequence[SnapshotStore], step: int | None) -> int:
    found = [(store, number) for store in stores for number in reversed(store.steps()) if step in (None, number)]
    if step is not None and not found:
        found = [(stores[0], step)]
    bad = 0
    for store, number in found:
        try:
            manifest = store.verify(number)
            print(f"{store.series} {number}: ok, {len(manifest.files)} files, {manifest.total_bytes:,} bytes")
        except (SnapshotError, OSError) as error:
            if step is None and number not in (there := store.steps()):
                print(f"{store.series} {number}: removed meanwhile, as by a job that runs")
                # what it has saved since: with one that is kept, nothing would be verified otherwise
                found += [(store, other) for other in reversed(there) if (store, other) not in found]
                continue
            bad += 1
            print(f"{store.series} {number}: BAD, {error}")
    if not found:
        print(f"no snapshot in {stores[0].directory}")
    return 1 if bad else 0


def _export(store: SnapshotStore, step: int | None, state: str, to: Path) -> tuple[int, tuple[Path, ...]]:
    """The step, and what is written of it."""
    import torch
    from safetensors.torch import save_file

    from ddp_trainer.snapshots.codec.state import SHARDS, parse_files, read_files

    if step is None:
        newest = store.load_newest(read_files)
        if newest is None:
            raise SnapshotError(f"no valid snapshot in {store.directory}: see `ls` and `verify`")
        manifest, files = newest
        step = manifest.step
    else:
        manifest = store.verify(step)
        files = read_files(store.directory / step_directory(step), manifest)
    states = parse_files(files)
    if any(name.startswith(f"{SHARDS}/") for name in manifest.files) and state not in states:
        from ddp_trainer.snapshots.sharded import whole_state

        with contextlib.suppress(KeyError):
            states[state] = whole_state(store.directory / step_directory(step), manifest, state)
    if state not in states:
        raise SnapshotError(f"snapshot of step {step} has no state {state!r}; it has {', '.join(sorted(states))}")
    to.mkdir(parents=True, exist_ok=True)
    written = to / f"{state}.pt", to / f"{state}.safetensors"
    torch.save(states[state], written[0])
    tensors = {name: value for name, value in states[state].items() if isinstance(value, torch.Tensor)}
    save_file(tensors, written[1], metadata={"format": "pt"})
    return step, written


def _hold(step: int, files: Sequence[Path], seconds: int) -> None:
    """One object in one line (docs/contracts.md section 6), and time for another process to read them."""
    found = [{"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files]
    print(json.dumps({"step": step, "files": found}), flush=True)
    time.sleep(seconds)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _restore(directory: Path, step: int) -> int:
    newer = restore.ask(directory, step)
    aside = f", and sets aside {', '.join(path.name for path in newer)}" if newer else ""
    print(f"step {step}: verified; the next attempt begins from it{aside}")
    return 0


def _remove(stores: Sequence[SnapshotStore], steps: Sequence[int]) -> int:
    """Remove what there is of each of these steps, set aside or not, or nothing if one of them has nothing."""
    directory = stores[0].directory
    aside = restore.aside_in(directory)
    found = {
        step: [
            path
            for store in stores
            for path in (store.path(step), store.path(step).with_name(f"{store.path(step).name}{CORRUPT}"), *aside)
            if os.path.lexists(path) and path.name.removesuffix(CORRUPT) == step_directory(step, store.series)
        ]
        for step in steps
    }
    if missing := [step for step, paths in found.items() if not paths]:
        raise SnapshotError(f"there is no snapshot of step {', '.join(map(str, missing))}; `ls` lists those there are")
    for path in (path for paths in found.values() for path in paths):
        # renamed first, to a name that the next writer clears away: half of it must not look like one that went bad.
        # It looks for them in the job's directory, and not where snapshots are set aside. In a container, one that was
        # killed had the same process number.
        gone = directory / f"{TEMPORARY}gone-{path.name}-{os.getpid()}-{time.time_ns()}"
        path.rename(gone)
        with contextlib.suppress(FileNotFoundError):  # the writer may have come to it first
            if gone.is_symlink():
                gone.unlink()
            else:
                shutil.rmtree(gone)
        print(f"{path.name}: removed")
    return 0


def _line(series: Series, info: SnapshotInfo) -> str:
    if info.problem is not None:
        return f"{series} {info.step:>10}  BAD  {info.path.name}: {info.problem}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.time))
    note = "" if info.loss_is_finite else "  the loss of this step is NaN or infinite"
    return f"{series} {info.step:>10}  {when}  {info.kind:<9}  {info.bytes:>15,} bytes{note}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_trainer.snapshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("ls", "list"),
        ("verify", "verify checksums"),
        ("export", "export the model"),
        ("restore", "have the next attempt begin from a snapshot"),
        ("rm", "remove"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("directory", type=Path, metavar="DIR")
        if name == "rm":
            command.add_argument("--step", type=int, action="append", required=True, help="of which; may be repeated")
        elif name == "restore":
            command.add_argument("--step", type=int, required=True, help="of which")
        elif name == "ls":
            command.add_argument("--json", action="store_true", help="one JSON object a line")
        else:
            command.add_argument(
                "--step", type=int, help="this snapshot only; the default is all, or the newest valid one"
            )
        if name == "export":
            command.add_argument("--state", default="model", help="which state to export (default: model)")
            command.add_argument("--to", type=Path, default=Path(), help="directory to write to (default: this one)")
            command.add_argument("--hold", type=int, metavar="SECONDS", help="print sizes and sums as JSON, and wait")
    return parser


if __name__ == "__main__":
    sys.exit(main())
