"""A main thread that waits for what nothing wakes is told from one that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS, eventually
from torch.utils.data import Dataset

from ddp_trainer.client.finite import FiniteLosses
from ddp_trainer.contract.environment import parse_job
from ddp_trainer.contract.exit_codes import RollBack
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.live import connections
from ddp_trainer.live.connections import Stuck
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.storage_waits import awaits_storage
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots import resuming, schedule
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.saving import BackgroundWriter
from ddp_trainer.snapshots.schedule import SaveInterval, SaveSchedule
from ddp_trainer.snapshots.trust import rollback
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.values import Identity
from ddp_trainer.train.data import fetch

SECONDS = 1.0


class Looks:
    """What `Stuck` says again and again, on a thread as that of the watch."""

    def __init__(self) -> None:
        self.stuck = Stuck()
        self.is_stuck = threading.Event()
        self.count = 0
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self.ended.wait(0.05):
            self.count += 1
            if self.stuck.look():
                self.is_stuck.set()


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STUCK_SECONDS", SECONDS)


def test_a_thread_that_computes_is_not_stuck() -> None:
    with Looks() as looks:
        began = time.thread_time()
        while time.thread_time() - began < 2 * SECONDS:
            sum(range(1000))
        assert looks.count > 1
        assert not looks.is_stuck.is_set()


def test_a_thread_that_waits_is_stuck() -> None:
    with Looks() as looks:
        assert looks.is_stuck.wait(PATIENCE_SECONDS)


def test_a_thread_that_compiles_is_not_stuck() -> None:
    """With inductor it waits for a compiler, for which a backend stands that waits."""

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(3 * SECONDS)
        return graph.forward

    with Looks() as looks:
        torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(2))
        assert looks.count > 1
        assert not looks.is_stuck.is_set()
        assert looks.is_stuck.wait(PATIENCE_SECONDS), "what it waits for after that does not count"


def test_what_was_waited_before_does_not_count() -> None:
    stuck = Stuck()
    assert not stuck.look()
    time.sleep(SECONDS)
    stuck.reset()
    assert not stuck.look()


def test_a_process_that_stood_still_has_not_waited_for_all_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread could not go on, either, and the look comes first. If it then does not, it is stuck."""
    now = [1000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], clock_gettime=lambda clock: 7.0, pthread_getcpuclockid=lambda thread: 0
    )
    monkeypatch.setattr(connections, "time", clock)
    stuck = Stuck()
    found = []
    for seconds in (0.0, 10 * SECONDS, 0.4 * SECONDS, 0.4 * SECONDS):
        now[0] += seconds
        found.append(stuck.look())
    assert found == [False, False, False, True]


class Storage:
    """A volume that holds nothing, and takes longer by a clock that only it advances than a thread may be stuck."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 1000.0
        clock = SimpleNamespace(
            monotonic=lambda: self._now, clock_gettime=lambda clock: 7.0, pthread_getcpuclockid=lambda thread: 0
        )
        monkeypatch.setattr(connections, "time", clock)
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._stuck = Stuck()
        self.fence = Fence.acquire(folder, created=1, attempt=0, uid="u")
        self.waits = 0
        self.was_stuck = False

    def slow(self, owner: Any, name: str, result: Any = None) -> None:
        """From now on `owner.name` takes its time, and has this result."""

        def wait(*_: Any, **__: Any) -> Any:
            main = threading.main_thread()
            if threading.current_thread() is not main:  # which may not have come to its wait yet
                eventually(lambda: awaits_storage(main.ident or 0), "the main thread waits for the volume")
            self.was_stuck |= self.is_stuck_after(3 * SECONDS)
            self.waits += 1
            return result

        self._monkeypatch.setattr(owner, name, wait)

    def is_stuck_after(self, seconds: float) -> bool:
        """Whether a look in this time says so. Between two looks less passes than counts as one wait."""
        found = []
        for _ in range(round(seconds / (0.4 * SECONDS)) + 1):
            self._now += 0.4 * SECONDS
            found.append(self._stuck.look())
        return any(found)

    def find_newest(self) -> None:
        identity = Identity("digits", "u", 1, 0, 0, 1)
        resuming.find_newest(self.folder, identity, Ranks(0, 1), keep=1)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    return Storage(tmp_path, monkeypatch)


def save(storage: Storage) -> None:
    storage.slow(SnapshotStore, "save")
    writer = BackgroundWriter()
    writer.start(1, 0.0, lambda: SnapshotStore(storage.folder, keep=1, fence=None).save(*[None] * 3))  # type: ignore
    assert writer.wait(PATIENCE_SECONDS)


def acquire_the_fence(storage: Storage) -> None:
    storage.slow(Fence, "acquire", storage.fence)
    storage.find_newest()


def read_the_newest_snapshot(storage: Storage) -> None:
    storage.slow(SnapshotStore, "load_newest")
    storage.find_newest()


def read_a_snapshot_that_rank_0_has_chosen(storage: Storage) -> None:
    storage.slow(resuming, "read_files", {})
    ranks = Ranks(0, 1)
    ranks.rank = 1
    resuming.share(storage.folder, Manifest("digits", "u", 0, 7, 0, 56, 2, "ddp", 8, 1763703999.0), {}, ranks)


def check_the_fence(storage: Storage) -> None:
    storage.slow(Fence, "check")
    resuming.check_owner(SnapshotStore(storage.folder, keep=1, fence=storage.fence), Ranks(0, 1))


def read_the_history_of_the_job(storage: Storage) -> None:
    storage.slow(schedule, "history", ())
    SaveSchedule(SaveInterval.parse("auto"), Ranks(0, 1), storage.folder, nodes=1).start(0)


def losses(storage: Storage) -> FiniteLosses:
    log = RunLog(parse_job({"DDPJOB_SHARED": str(storage.folder)}, default_name="digits"), World())
    return FiniteLosses("Rollback", log, Heartbeat(None), Ranks(0, 1), lambda: storage.fence)


def read_what_to_roll_back(storage: Storage) -> None:
    storage.slow(rollback, "asked", [])
    losses(storage).resumed()


def ask_to_roll_back(storage: Storage) -> None:
    storage.slow(rollback, "ask")
    with pytest.raises(RollBack):
        losses(storage).weights_are_not_finite(7)


def write_the_last_lines(storage: Storage) -> None:
    log = RunLog(parse_job({"DDPJOB_SHARED": str(storage.folder)}, default_name="digits"), World())
    storage.slow(log.losses, "close")
    log.close()


def load_data(storage: Storage) -> None:
    class Images(Dataset[torch.Tensor]): ...

    storage.slow(Images, "__getitem__", torch.zeros(1))
    fetch(Images(), torch.arange(1))


@pytest.mark.parametrize(
    "use",
    [
        save,
        acquire_the_fence,
        read_the_newest_snapshot,
        read_a_snapshot_that_rank_0_has_chosen,
        check_the_fence,
        read_the_history_of_the_job,
        read_what_to_roll_back,
        ask_to_roll_back,
        write_the_last_lines,
        load_data,
    ],
)
def test_a_thread_that_waits_for_the_volume_is_not_stuck(storage: Storage, use: Callable[[Storage], None]) -> None:
    use(storage)
    assert storage.waits
    assert not storage.was_stuck
    assert storage.is_stuck_after(2 * SECONDS), "what it waits for after that does not count"
