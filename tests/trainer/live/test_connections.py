"""Leaving a gloo group: no collective waits for another rank any more."""

from __future__ import annotations

import os
import resource
import subprocess
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked
from torch.distributed import ProcessGroup, Work

from ddp_trainer.contract.messages import peer_lost
from ddp_trainer.contract.processes import allow_files
from ddp_trainer.live.connections import Connections

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from ddp_trainer.live.connections import Connections

folder, rank, case = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = f"file://{folder}/store"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=1000))
group = dist.distributed_c10d._get_default_group()
connections = Connections(timedelta(seconds=1000))
connections.opened(group)
large = torch.ones(100_000_000 if case == "half a message" else 1)
dist.barrier()
if rank == 1:
    if case == "lost buffer":
        group.send([torch.ones(1000)], 0, 1).wait()
    if case == "half a message":
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        dist.broadcast(large, src=1)
    time.sleep(1000)
if case == "half a message":
    awaited = dist.broadcast(large, src=1, async_op=True)
else:
    if case == "lost buffer":
        group.recv([torch.empty(1000)], 1, 1)  # nobody keeps it: as of a collective that has failed
    awaited = group.recv([torch.empty(1)], 1, 2)
    time.sleep(1)
    connections.close()
began = time.monotonic()
try:
    connections.waited(awaited, lambda: time.monotonic() > began + 1)
except RuntimeError as error:
    print(str(error).partition(chr(10))[0])
connections.destroy(is_lost=True)
del awaited, group
"""


@pytest.mark.processes
@pytest.mark.parametrize("case", ["nothing was sent", "lost buffer", "half a message"])
def test_a_rank_goes_on_at_once(tmp_path: Path, case: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [*forked.command(0, str(script)), str(tmp_path)]
    own = os.environ | {"PYTHONPATH": str(ROOT / "trainer_image")}
    ranks = [
        subprocess.Popen([*command, str(rank), case], env=own, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=PATIENCE_SECONDS)  # the timeout of the group is 1,000 s
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 0
    assert peer_lost(printed), printed


class EndsAfterTheFirstWait:
    """A collective that ends, by `error` or well, between the timeout of a wait and the next question."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._waits > 0


def wait_for(work: Any) -> None:
    Connections(timedelta(seconds=1)).waited(cast(Work, work), lambda: True)


def test_a_collective_that_ends_well_just_after_a_timeout_has_not_failed() -> None:
    wait_for(EndsAfterTheFirstWait(None))


def test_a_collective_that_fails_just_after_a_timeout_says_why() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for(EndsAfterTheFirstWait("Connection closed by peer [10.0.0.2]:4711"))


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(("seconds", "is_kept"), [(1000.0, True), (0.0, False)])
def test_a_group_that_lost_a_rank_is_kept_until_its_collectives_have_timed_out(seconds: float, is_kept: bool) -> None:
    connections, group = Connections(timedelta(seconds=seconds)), Alone()
    connections.opened(cast(ProcessGroup, group))
    found = weakref.ref(group)
    del group
    connections.destroy(is_lost=True)
    assert found() is not None, "its destructor would wait for a collective that nothing wakes"
    connections.destroy(is_lost=False)
    assert (found() is not None) is is_kept


@pytest.fixture
def files() -> Iterator[int]:
    """The greatest limit of open files that this process may have; it has a small one."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_rank_may_have_the_files_of_many_groups(files: int) -> None:
    allow_files(1000)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, files)
    allow_files(500)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, files)
    allow_files(files + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files, files)
