"""A main thread that waits for what nothing wakes is told from one that computes."""

from __future__ import annotations

import threading
import time

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.live import connections
from ddp_trainer.live.connections import Stuck

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


def test_what_was_waited_before_does_not_count() -> None:
    stuck = Stuck()
    assert not stuck.look()
    time.sleep(SECONDS)
    stuck.reset()
    assert not stuck.look()
