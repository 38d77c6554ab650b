"""Check whether this machine and these ranks can train, and report what to fix.

    torchrun --nproc-per-node 2 -m ddp_trainer.doctor
    torchrun --nproc-per-node 2 -m ddp_trainer.doctor --mebibytes 64 --timeout-seconds 30

Each collective is checked for its result and timed; a rank that does not join is named. Then, on every node: GPUs that
torch does not see, shared memory for data workers, the volume, the network interface, and how far the clocks are apart.
The exit code is 0 if all is well, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World, describe_world, gpus_present, process_group, why_unseen

SHM: Final = Path("/dev/shm")  # noqa: S108 - looked at, never written to
SHM_BYTES: Final = 256 << 20
DISK_BYTES: Final = 1 << 30
CLOCK_SECONDS: Final = 2.0
ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, what was found, and if it is not well, what to do."""

    what: str
    found: str
    advice: str | None = None

    @property
    def well(self) -> bool:
        return self.advice is None

    def __str__(self) -> str:
        return f"{'ok  ' if self.well else 'FAIL'} {self.what}: {self.found}" + (
            "" if self.well else f"; {self.advice}"
        )


def main(argv: Sequence[str]) -> int:
    """Examine all ranks, print the report on rank 0, and return the exit code."""
    arguments = _arguments(argv)
    world = describe_world(device=arguments.device)
    try:
        with process_group(world, timeout_seconds=arguments.timeout_seconds):
            findings = examine(world, nbytes=arguments.mebibytes << 20, timeout=arguments.timeout_seconds)
            if world.leads:
                print("\n".join(map(str, findings)), flush=True)
            return 0 if all(finding.well for finding in findings) else 1
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        advice = "look at that rank's node and log, and that the ports between the nodes are open"
        print(Finding(f"rank {world.rank}", what, advice), file=sys.stderr, flush=True)
        return 1


def examine(world: World, *, nbytes: int, timeout: float) -> list[Finding]:
    """All findings, the same on every rank. Raises RuntimeError naming a rank that is absent."""
    present = roll_call(world, timeout)
    checked = [check(world, name, run, nbytes) for name, run in COLLECTIVES.items()]
    reports: list[list[Finding] | None] = [None] * world.size
    dist.all_gather_object(reports, list(node()) if world.local_rank == 0 else [])
    return [present, *checked, clocks(world), *(finding for report in reports for finding in report or ())]


def roll_call(world: World, timeout: float) -> Finding:
    """Every rank answers in the rendezvous' store, where any backend can look. Raises RuntimeError naming the
    absent.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"doctor/rank-{world.rank}", "here")
    until = time.monotonic() + timeout
    absent = []
    for rank in range(world.size):
        try:
            store.wait([f"doctor/rank-{rank}"], timedelta(seconds=max(0.1, until - time.monotonic())))
        except RuntimeError:
            absent.append(str(rank))
    if absent:
        raise RuntimeError(f"rank {', '.join(absent)} did not answer within {timeout:.0f} s")
    return Finding("ranks", f"all {world.size} are here, on {world.device.type} with {world.backend}")


def all_reduce(world: World, data: Tensor) -> bool:
    data.fill_(world.rank + 1)
    dist.all_reduce(data)
    return bool((data == world.size * (world.size + 1) / 2).all())


def broadcast(world: World, data: Tensor) -> bool:
    data.fill_(7 if world.leads else 0)
    dist.broadcast(data, src=0)
    return bool((data == 7).all())


def gather(world: World, data: Tensor) -> bool:
    data.fill_(world.rank)
    parts = [torch.empty_like(data) for _ in range(world.size)] if world.leads else None
    dist.gather(data, parts, dst=0)
    return parts is None or all(bool((part == rank).all()) for rank, part in enumerate(parts))


def scatter(world: World, data: Tensor) -> bool:
    parts = [torch.full_like(data, rank) for rank in range(world.size)] if world.leads else None
    dist.scatter(data, parts, src=0)
    return bool((data == world.rank).all())


COLLECTIVES: Final[dict[str, Callable[[World, Tensor], bool]]] = {
    "all-reduce": all_reduce,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
}


def check(world: World, name: str, run: Callable[[World, Tensor], bool], nbytes: int) -> Finding:
    """Run a collective over `nbytes` a rank; its median time, and on which ranks the result was wrong."""
    data = torch.empty(nbytes // 4, device=world.device)
    times = []
    right = True
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        right &= run(world, data)
        times.append(time.perf_counter() - started)
    verdicts: list[bool | None] = [None] * world.size
    dist.all_gather_object(verdicts, right)
    wrong = [str(rank) for rank, verdict in enumerate(verdicts) if not verdict]
    seconds = sorted(times)[ROUNDS // 2]
    found = f"{nbytes / 2**20:.0f} MiB a rank in {seconds * 1e3:.1f} ms, {nbytes / seconds / 2**20:.0f} MiB/s"
    if wrong:
        return Finding(
            name, f"wrong result on rank {', '.join(wrong)}", "do not train here: memory or network corrupts data"
        )
    return Finding(name, found)


def node() -> Iterator[Finding]:
    """What only a look at this node itself can tell."""
    host = socket.gethostname()
    if (present := gpus_present(os.environ)) and not torch.cuda.device_count():
        yield Finding(f"{host}: GPUs", f"{present} are there, and torch sees none", why_unseen())
    yield _space(f"{host}: shared memory", SHM, SHM_BYTES, "mount an emptyDir of medium Memory there")
    volume = Path(os.environ.get("DDPJOB_SHARED", tempfile.gettempdir()))
    yield _space(f"{host}: volume", volume, DISK_BYTES, "enlarge the volume or remove old checkpoints")
    written = _writable(f"{host}: volume", volume)
    yield written
    if written.well:
        yield _renames(f"{host}: volume", volume)
    names = [name for _, name in socket.if_nameindex()]
    shown = ", ".join(names)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = os.environ.get(variable)
        known = not asked or has_interface(variable, asked, names)
        found = f"{variable} is {asked}" if asked else f"{variable} is not set; there are {shown}"
        yield Finding(f"{host}: interface", found, None if known else f"there is none such: choose of {shown}")


def has_interface(variable: str, asked: str, names: Sequence[str]) -> bool:
    """Whether one of the interfaces `names` is what the value of the variable asks for: gloo takes names, all of which
    it needs; NCCL prefixes, of which it needs one, `=` before names, and `^` before all that it must not use.
    """
    if variable.startswith("GLOO"):
        return set(asked.split(",")) <= set(names)
    excluded, exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
    given = [part for part in asked.lstrip("^=").split(",") if part]
    return any(any(name == part if exact else name.startswith(part) for part in given) != excluded for name in names)


def clocks(world: World) -> Finding:
    """How far the clocks of the ranks are apart, as read right after a barrier that all leave together. The nearest
    readings count: a rank that gets no processor for a moment reads its clock late.
    """
    apart = min(_apart(world) for _ in range(ROUNDS))
    advice = None if apart < CLOCK_SECONDS else "synchronise them (NTP), or times in logs will mislead"
    return Finding("clocks", f"{apart:.3f} s apart", advice)


def _apart(world: World) -> float:
    times: list[float | None] = [None] * world.size
    dist.barrier()
    dist.all_gather_object(times, time.time())
    known = [moment for moment in times if moment is not None]
    return max(known) - min(known)


def _space(what: str, path: Path, least: int, advice: str) -> Finding:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(what, f"{path}: {error.strerror}", advice)
    if usage.total == 0:  # as of some file systems on FUSE
        return Finding(what, f"{path} reports no size")
    free = usage.free
    found = f"{free / 2**30:.1f} GiB free in {path}"
    return Finding(what, found, None if free >= least else f"less than {least / 2**30:.2g} GiB: {advice}")


def _writable(what: str, path: Path) -> Finding:
    started = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(8 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(what, f"{path} cannot be written: {error.strerror}", "mount it writable for this user")
    return Finding(what, f"writes {8 / (time.perf_counter() - started):.0f} MiB/s")


def _renames(what: str, path: Path) -> Finding:
    """Whether a folder that is not empty gets another name, as each snapshot does: those of a bucket may not."""
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix=".ddpjob-doctor-", ignore_cleanup_errors=True) as folder:
            made = Path(folder, "made")
            made.mkdir()
            (made / "file").write_bytes(b"1")
            made.rename(made.with_name("renamed"))
    except OSError as error:
        advice = "use a file system, or a bucket with a hierarchical namespace: no snapshot could be saved"
        return Finding(what, f"{path} does not rename folders: {error.strerror}", advice)
    return Finding(what, "renames folders")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_trainer.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mebibytes", type=int, default=16, help="size of each message (default: 16)")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="how long to wait for a rank (default: 60)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="as in ddp_trainer.train")
    return parser.parse_args(list(argv))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as refused:
        print(f"ddp_trainer.doctor: {refused}", file=sys.stderr)
        sys.exit(refused.exit_code)
