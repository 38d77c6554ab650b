"""Ranks that meet again and again while rank 0 reads what takes longer than one of their collectives may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.waiting import PATIENCE_SECONDS

from ddp_trainer.snapshots import resuming, rounds
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.rounds import Reading, meet
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, Snapshots


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 0.01)


class First(Ranks):
    """Rank 0, whose peers are lost in round `lost_in`; notes what it has sent them."""

    def __init__(self, *, lost_in: int | None = None) -> None:
        super().__init__(0, 1)
        self.sent: list[tuple[int, ...]] = []
        self.third = threading.Event()
        """Set in the third round."""
        self._lost_in = lost_in

    def numbers_from_first(self, *numbers: int) -> tuple[int, ...]:
        self.sent.append(numbers)
        if len(self.sent) == self._lost_in:
            self.third.set()
            raise RuntimeError("Connection closed by peer")
        if len(self.sent) == 3:
            self.third.set()
        return numbers


class Second(Ranks):
    """A rank that gets these numbers from rank 0."""

    def __init__(self, *numbers: tuple[int, int]) -> None:
        super().__init__(0, 1)
        self._numbers: Iterator[tuple[int, int]] = iter(numbers)

    def numbers_from_first(self, *_: int) -> tuple[int, ...]:
        return next(self._numbers)


def test_the_ranks_meet_while_rank_0_verifies_the_newest_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Identity("digits", "uid-1", 1, 0, 0, 1)
    settings: dict[str, Any] = {"every": SaveInterval.parse("1steps"), "keep": 2, "strategy": "ddp", "global_batch": 1}
    snapshots = Snapshots(tmp_path, {"model": torch.nn.Linear(2, 2)}, identity=identity, **settings)
    snapshots.resume()
    snapshots.save(Progress(1, 0, 1), wait=True)
    snapshots.close()
    ranks, read = First(), resuming.read_files
    met: list[bool] = []

    def read_slowly(directory: Path, manifest: Any, **settings: Any) -> Any:
        files = read(directory, manifest, **settings)
        met.append(ranks.third.wait(PATIENCE_SECONDS if not met else 0.0))
        return files

    monkeypatch.setattr(resuming, "read_files", read_slowly)
    beats: list[None] = []
    _, found = resuming.find_newest(tmp_path, identity, ranks, keep=2, beat=lambda: beats.append(None))
    assert met == [True]
    assert found is not None
    assert found[0].step == 1
    assert beats, "what it has read is progress"


def test_a_rank_shows_progress_in_the_rounds_in_which_rank_0_has_read_something() -> None:
    beats: list[None] = []
    meet(Second((0, 1), (0, 0), (0, 0), (1, 1)), None, lambda: beats.append(None))
    assert len(beats) == 2


def test_a_volume_that_hangs_shows_no_progress() -> None:
    ranks, beats = First(), list[None]()

    def hang(on_read: Callable[[], None]) -> bool:
        return ranks.third.wait(PATIENCE_SECONDS)

    reading = Reading(hang)
    meet(ranks, reading, lambda: beats.append(None))
    assert reading.result()
    assert beats == []
    assert ranks.sent[-1] == (1, 0)


def test_rank_0_reads_to_the_end_before_it_raises_that_a_rank_is_lost() -> None:
    ranks, is_read = First(lost_in=2), threading.Event()

    def read(on_read: Callable[[], None]) -> None:
        assert ranks.third.wait(PATIENCE_SECONDS)
        is_read.set()

    with pytest.raises(RuntimeError, match="closed by peer"):
        meet(ranks, Reading(read))
    assert is_read.is_set()


def test_what_a_reading_raises_is_raised_once_the_ranks_have_met() -> None:
    def fail(on_read: Callable[[], None]) -> None:
        raise OSError("the disk")

    ranks, reading = First(), Reading(fail)
    meet(ranks, reading)
    assert ranks.sent[-1][0] == 1
    with pytest.raises(OSError, match="the disk"):
        reading.result()
