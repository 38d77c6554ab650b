"""A rank that waits in vain for a lost one ends; one that waits for the volume does not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddp_trainer.live import connections, watch
from ddp_trainer.live.membership import Membership
from ddp_trainer.live.register import Register
from ddp_trainer.live.views import Member, View
from ddp_trainer.rank.storage_waits import awaits_storage
from ddp_trainer.snapshots.saving import BackgroundWriter

SECONDS = 1.0


class Kills:
    """The signals that this process sends instead of ending itself."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.signals: list[int] = []

    def __call__(self, pid: int, number: int) -> None:
        assert pid == os.getpid()
        self.signals.append(number)
        self.came.set()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Kills:
    kills = Kills()
    monkeypatch.setattr(os, "kill", kills)
    return kills


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: Kills) -> Iterator[Membership]:
    """One of two ranks; it has learned that the other has ended."""
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(connections, "STUCK_SECONDS", SECONDS)
    register = Register(tmp_path / "views")
    left = Membership(register, node_rank=0, local_rank=0, host="127.0.0.1", least=1, timeout_seconds=60.0)
    ended = Member("ended", 1, 0, "127.0.0.1", free_port())
    left.view = register.propose(View(0, (left.own, ended), left.own.id, "127.0.0.1", 1))
    yield left
    left.stop()


def lost_one(left: Membership) -> None:
    eventually(left._is_lost.is_set, "the watch has found that the other has ended")


def test_a_rank_that_waits_for_a_lost_one_ends(left: Membership, kills: Kills) -> None:
    lost_one(left)
    assert kills.came.wait(PATIENCE_SECONDS)
    assert set(kills.signals) == {signal.SIGKILL}


def test_a_rank_that_waits_for_its_snapshot_does_not(
    left: Membership, kills: Kills, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.get_ident()
    saved: list[int] = []

    def save() -> None:
        eventually(lambda: awaits_storage(main), "the rank waits")
        time.sleep(SECONDS)
        monkeypatch.setattr(connections, "STUCK_SECONDS", SECONDS)
        time.sleep(3 * SECONDS)
        saved.append(7)

    monkeypatch.setattr(connections, "STUCK_SECONDS", PATIENCE_SECONDS)  # however long it takes to begin
    lost_one(left)
    writer = BackgroundWriter()
    writer.start(7, 0.0, save)
    assert writer.wait(2 * PATIENCE_SECONDS)
    assert saved
    assert not kills.signals


class Asleep:
    """A collective that nothing wakes."""

    def wait(self, timeout: timedelta = timedelta(seconds=3 * SECONDS)) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Wait timeout")

    def is_completed(self) -> bool:
        return False


def test_a_rank_that_leaves_after_the_others_have_ended_does_not(
    left: Membership, kills: Kills, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "barrier", lambda async_op=False: Asleep() if async_op else Asleep().wait())
    with contextlib.suppress(RuntimeError):
        left.close()
    assert not kills.signals
    assert left._register.is_finished


def test_a_rank_that_notes_the_end_of_training_does_not(
    left: Membership, kills: Kills, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Register] = []

    def finish(register: Register) -> None:
        time.sleep(SECONDS)
        monkeypatch.setattr(connections, "STUCK_SECONDS", SECONDS)
        time.sleep(3 * SECONDS)
        noted.append(register)

    monkeypatch.setattr(connections, "STUCK_SECONDS", PATIENCE_SECONDS)  # however long it takes to begin
    lost_one(left)
    monkeypatch.setattr(dist, "barrier", lambda async_op: Asleep())
    monkeypatch.setattr(Register, "finish", finish)
    left.close()
    assert noted
    assert not kills.signals


def test_a_member_that_stops_leaves_no_thread(left: Membership) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("live")}

    assert names() == {"live watch", "live listener"}
    left.stop()
    eventually(lambda: not names(), "its threads have ended")
