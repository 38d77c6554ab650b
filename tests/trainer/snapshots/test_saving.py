"""Saving goes on behind training's back: a disk that is slow, hangs or fails never stops it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.snapshots.conftest import manifest_of
from tests.trainer.snapshots.one_rank import Run

from ddp_trainer.snapshots import saving
from ddp_trainer.snapshots.codec.structure import Deferred
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.saving import BackgroundWriter, Saver
from ddp_trainer.snapshots.session import Progress
from ddp_trainer.snapshots.sharded import Shards
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry


class SlowDisk(Disk):
    """Blocks every new file until it is released; says when the first one is reached."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def create(self, path: Path, chunks: Any) -> FileEntry:
        self.reached.set()
        assert self.released.wait(60)
        return super().create(path, chunks)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Run, SlowDisk]]:
    """A run on a disk that takes for ever until it is released."""
    run = Run(tmp_path, keep=9)
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    yield run, disk
    disk.released.set()
    run.snapshots.close()


def use(run: Run, disk: Disk) -> None:
    saver = run.snapshots._saver
    assert saver is not None
    saver._store.disk = disk


def test_training_goes_on_while_a_snapshot_is_written_and_the_snapshot_is_of_its_own_step(
    slow: tuple[Run, SlowDisk], tmp_path: Path
) -> None:
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train(3)
    assert run.events == [], "step 3 was done while step 2 was still being written"
    disk.released.set()
    run.snapshots.close()
    assert run.results() == ["saved"]
    resumed = Run(tmp_path, attempt=1, seed=5)
    resumed.snapshots.resume()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.model.state_dict().items())


def test_training_does_not_wait_for_a_value_that_waits_for_the_volume(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.snapshots.resume()
    training, threads = threading.current_thread(), list[threading.Thread]()
    is_released = threading.Event()

    def written() -> list[str]:
        threads.append(threading.current_thread())
        assert threads[0] is not training, "training computes it"
        assert is_released.wait(PATIENCE_SECONDS)
        return []

    run.cursor.state_dict = lambda: {"samples": 0, "waiting": Deferred(written)}  # type: ignore[method-assign]
    run.train(3)
    is_released.set()
    run.snapshots.close()
    assert run.results() == ["saved"]
    assert [thread.name for thread in threads] == ["snapshot-2"]


def test_a_snapshot_due_while_a_slow_one_is_written_is_skipped_and_says_so(
    slow: tuple[Run, SlowDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_SECONDS", 0.01)
    run, disk = slow
    run.train(4)
    assert run.results() == ["skipped"]
    assert "no snapshot of step 4: that of step 2 is still being written" in run.events[0].message
    disk.released.set()
    assert run.snapshots._saver is not None
    assert run.snapshots._saver._writer.wait(60)
    run.train(6)
    run.snapshots.close()
    assert [event.step for event in run.events if event.result == "saved"] == [2, 6]


def release_once_waited_for(disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk goes on only when training waits for it, so a save that does not wait for the one in flight fails."""
    wait = BackgroundWriter.wait

    def release_and_wait(writer: BackgroundWriter, timeout: float) -> bool:
        disk.released.set()
        return wait(writer, timeout)

    monkeypatch.setattr(BackgroundWriter, "wait", release_and_wait)


def test_a_final_snapshot_waits_for_the_one_in_flight(
    slow: tuple[Run, SlowDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    run.train(3)
    release_once_waited_for(disk, monkeypatch)
    assert run.snapshots.save(Progress(3, 0, 48), kind="preempted", wait=True)
    assert [event.step for event in run.events if event.result == "saved"] == [2, 3]


def test_waiting_for_a_periodic_snapshot_that_is_being_written_waits_until_it_is(
    slow: tuple[Run, SlowDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PATIENCE_SECONDS", 0.01)
    run, disk = slow
    run.train(2)
    assert disk.reached.wait(60)
    release_once_waited_for(disk, monkeypatch)
    assert run.snapshots.save(Progress(2, 0, 32), wait=True)
    assert run.results() == ["saved"]


def test_a_disk_that_hangs_does_not_hang_the_end_of_training(tmp_path: Path) -> None:
    run = Run(tmp_path, save_timeout=0.2)
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    run.train(2)
    started = time.monotonic()
    assert run.snapshots.save(Progress(2, 0, 32), kind="preempted", wait=True) is False
    run.snapshots.close()
    assert time.monotonic() - started < 10
    assert run.events[-1].result == "failed"
    assert "not written within 0 s: the volume hangs" in run.events[-1].message
    disk.released.set()


def test_a_save_of_many_bytes_may_take_longer_until_its_disk_is_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SLOWEST_BYTES_PER_SECOND", 1.0)
    monkeypatch.setattr(saving, "ROUND_SECONDS", 0.05)
    run = Run(tmp_path, save_timeout=0.01)
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    run.train(1)
    release = threading.Timer(0.3, disk.released.set)
    release.start()
    assert run.snapshots.save(Progress(1, 0, 16), kind="final", wait=True)
    release.join()
    run.snapshots.close()
    assert run.results() == ["saved"]


def test_a_rank_that_is_lost_during_the_last_save_does_not_cost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 learns of it between two looks at its own save, which needs no other rank any more."""
    monkeypatch.setattr(saving, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(saving, "EMERGENCY_SECONDS", 0.0)
    run = Run(tmp_path, changes_with_optimizer=("cursor",))
    run.snapshots.resume()
    disk = SlowDisk()
    use(run, disk)
    run.train(1)
    release = threading.Timer(0.3, disk.released.set)

    def of_first(*numbers: int) -> tuple[int, ...]:
        if disk.reached.is_set():
            release.start()
            raise RuntimeError("Connection closed by peer")
        return numbers

    monkeypatch.setattr(run.snapshots._ranks, "numbers_from_first", of_first)
    with pytest.raises(RuntimeError, match="closed by peer") as lost:
        run.snapshots.save(Progress(1, 0, 16), kind="final", wait=True)
    assert run.snapshots.emergency(lost.value)
    assert run.results() == ["saved"]


class BrokenDisk(Disk):
    """Fails to create files until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False

    def create(self, path: Path, chunks: Any) -> FileEntry:
        if not self.is_mended:
            raise OSError(errno.EIO, "Input/output error")
        return super().create(path, chunks)


def test_failed_saves_never_stop_training_and_three_in_a_row_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    disk = BrokenDisk()
    use(run, disk)
    run.train(3)
    assert run.snapshots.save(Progress(3, 0, 48), kind="final", wait=True) is False
    assert [event.failures for event in run.events] == [1, 2, 3, 4]
    assert run.events[2].message.startswith("SnapshotsFailing: 3 saves in a row have failed")
    assert "check that the volume is mounted and writable" in run.events[0].message
    disk.is_mended = True
    run.train(5)
    run.snapshots.close()
    assert (run.events[-1].result, run.events[-1].failures) == ("saved", 0)


def test_a_state_that_cannot_be_saved_is_a_failed_save_and_not_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, every="1steps")
    run.snapshots.resume()
    run.scheduler.secret = lambda: None  # type: ignore[attr-defined]
    run.train(1)
    assert run.results() == ["failed"]
    assert "secret is a builtins.function" in run.events[0].message


@pytest.mark.parametrize(("rank", "is_of_the_first"), [(1, True), (2, False), (3, False)])
def test_of_several_copies_of_a_sharded_model_the_first_alone_is_copied_and_saved(
    rank: int, is_of_the_first: bool
) -> None:
    shards = create_autospec(Shards, instance=True, size=2, together=nullcontext)
    shards.stage.side_effect = SnapshotError("no room for the copy")
    saver = Saver({}, shards, Ranks(rank, 1), None, lambda event: None, last_saved=None, timeout=1.0)
    is_saving = saver.save(manifest_of(4), None, started=time.monotonic(), wait=False)
    assert shards.stage.called is is_of_the_first
    assert is_saving is not is_of_the_first
