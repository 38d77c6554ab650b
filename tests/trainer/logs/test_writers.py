"""The points of TensorBoard, where the volume refuses some."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tests.support.waiting import PATIENCE_SECONDS
from torch.utils.tensorboard import SummaryWriter

from ddp_trainer.logs.writers import TensorBoard


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a rank makes few event files, and numbers them from 0."""
    number_files_from(0, monkeypatch)


def number_files_from(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(first))


def next_second() -> None:
    """Until which no other event file is made."""
    time.sleep(1.0 - time.time() % 1.0)


def steps_shown(folder: Path) -> list[int]:
    return [point.step for point in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def write(board: TensorBoard, steps: range) -> None:
    for step in steps:
        board.write(step, {"loss": 0.5})


def test_a_volume_that_was_full_costs_the_points_of_that_time_alone(tmp_path: Path, monkeypatch) -> None:
    first = TensorBoard(tmp_path)
    write(first, range(1, 14))
    first.close()
    second = TensorBoard(tmp_path, resumed_at=10)
    write(second, range(11, 15))
    second._writer.flush()  # its thread may not have come to them when they are read
    with monkeypatch.context() as full:
        full.setattr(SummaryWriter, "add_scalar", _refuse)
        with pytest.raises(OSError, match="No space left"):
            write(second, range(15, 16))
    next_second()
    write(second, range(16, 18))
    second.close()
    assert steps_shown(tmp_path) == [*range(1, 15), 16, 17]


def test_what_an_earlier_attempt_logged_is_dropped_though_the_volume_was_full_at_first(tmp_path, monkeypatch) -> None:
    first = TensorBoard(tmp_path)
    write(first, range(1, 14))
    first.close()
    second = TensorBoard(tmp_path, resumed_at=10)
    with monkeypatch.context() as full:
        full.setattr(SummaryWriter, "flush", _refuse)
        with pytest.raises(OSError, match="No space left"):
            write(second, range(11, 12))
    next_second()
    write(second, range(12, 13))
    second.close()
    assert steps_shown(tmp_path) == [*range(1, 11), 12]


def test_no_file_is_read_before_the_one_that_drops_what_an_earlier_attempt_logged(tmp_path, monkeypatch) -> None:
    """TensorBoard reads files by their names, of which the second comes first and a number last: 10 comes before 9."""
    number_files_from(9, monkeypatch)
    board = TensorBoard(tmp_path, resumed_at=10)
    write(board, range(11, 12))
    board._writer.flush()
    with monkeypatch.context() as full:
        full.setattr(SummaryWriter, "add_scalar", _refuse)
        with pytest.raises(OSError, match="No space left"):
            write(board, range(12, 13))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:  # the next points come at once
        try:
            write(board, range(13, 15))
            break
        except OSError:
            assert time.monotonic() < deadline
    board.close()
    assert steps_shown(tmp_path) == [11, 13, 14]


def test_an_attempt_that_begins_anew_drops_all_that_an_earlier_one_logged(tmp_path: Path) -> None:
    """As where the first one has failed before its first snapshot: its curve lay over that of the second."""
    first = TensorBoard(tmp_path, resumed_at=0)
    write(first, range(14))
    first.close()
    second = TensorBoard(tmp_path, resumed_at=0)
    write(second, range(5))
    second.close()
    assert steps_shown(tmp_path) == [0, 1, 2, 3, 4]


def _refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")
