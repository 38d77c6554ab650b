"""What the workers of a run share is started once and ends after the last of them; some tests run alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.one_for_all import Turns, one_for_all
from tests.support.waiting import PATIENCE_SECONDS, eventually

SHORT_SECONDS = 0.2
"""In which what must not happen would."""


class Cluster:
    """What is started, and how often."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    @contextmanager
    def start(self) -> Iterator[dict[str, int]]:
        self.happened.append("started")
        yield {"port": len(self.happened)}
        self.happened.append("ended")


class Worker:
    """Another worker: a thread, which has file descriptors of its own, as a process has."""

    def __init__(self, block: Callable[[Worker], None]) -> None:
        self.is_in = threading.Event()
        self.may_leave = threading.Event()
        self._thread = threading.Thread(target=block, args=(self,), daemon=True)
        self._thread.start()

    def stay(self) -> None:
        self.is_in.set()
        assert self.may_leave.wait(PATIENCE_SECONDS)

    def leave(self) -> None:
        self.may_leave.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


def test_the_second_worker_uses_what_the_first_has_started_and_keeps_it_from_ending(tmp_path: Path) -> None:
    cluster, found = Cluster(), []

    def first(worker: Worker) -> None:
        with one_for_all(tmp_path, "cluster", cluster.start):
            worker.stay()

    def second(worker: Worker) -> None:
        with one_for_all(tmp_path, "cluster", cluster.start) as value:
            found.append(value)
            worker.stay()

    one = Worker(first)
    assert one.is_in.wait(PATIENCE_SECONDS)
    other = Worker(second)
    assert other.is_in.wait(PATIENCE_SECONDS)
    assert (cluster.happened, found) == (["started"], [{"port": 1}])
    one.may_leave.set()
    eventually(lambda: not (tmp_path / "cluster.json").exists(), "the first wants to end it")
    assert cluster.happened == ["started"]
    other.leave()
    one.leave()
    assert cluster.happened == ["started", "ended"]


def test_a_worker_that_comes_after_its_end_starts_it_anew(tmp_path: Path) -> None:
    cluster = Cluster()
    for _ in range(2):
        with one_for_all(tmp_path, "cluster", cluster.start):
            pass
    assert cluster.happened == ["started", "ended"] * 2


def test_a_start_that_fails_is_tried_by_the_next_one(tmp_path: Path) -> None:
    @contextmanager
    def fails() -> Iterator[None]:
        raise OSError("no nodes")
        yield

    cluster = Cluster()
    with pytest.raises(OSError, match="no nodes"), one_for_all(tmp_path, "cluster", fails):
        pass
    with one_for_all(tmp_path, "cluster", cluster.start) as value:
        assert value == {"port": 1}


def test_a_block_that_is_alone_waits_for_the_others_and_lets_none_in(tmp_path: Path) -> None:
    file, happened = tmp_path / "turn", []

    def beside(worker: Worker) -> None:
        with Turns(file).beside_others():
            worker.stay()

    def alone(worker: Worker) -> None:
        turns = Turns(file)
        with turns.alone(), turns.beside_others(), turns.alone():
            happened.append("alone")
            worker.stay()

    others = [Worker(beside), Worker(beside)]
    assert all(other.is_in.wait(PATIENCE_SECONDS) for other in others)
    one = Worker(alone)
    assert not one.is_in.wait(SHORT_SECONDS)
    for other in others:
        other.leave()
    assert one.is_in.wait(PATIENCE_SECONDS)
    late = Worker(beside)
    assert not late.is_in.wait(SHORT_SECONDS)
    one.leave()
    assert late.is_in.wait(PATIENCE_SECONDS)
    late.leave()
    assert happened == ["alone"]
