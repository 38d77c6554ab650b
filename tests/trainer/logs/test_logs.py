"""What is left to read: whole, in order, each step once, also where the volume was full for a while."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.trainer.documented import message
from tests.trainer.logs.conftest import fill

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.logs import log_files, losses, runlog, writers
from ddp_trainer.logs.log_files import LineFile, LogFile, LogThread, WriteErrors
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec.structure import to_json


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def job(shared: Path, attempt: int = 0) -> JobEnvironment:
    return JobEnvironment("digits", "u", 1, attempt, 1, shared, "100steps", 3)


def settled(log: RunLog) -> None:
    """Come back when all is done that the log was given so far."""
    done = threading.Event()
    while not log._thread.do(done.set):
        time.sleep(0.01)
    assert done.wait(60)


def test_a_write_that_the_volume_cuts_short_is_taken_back_and_made_later(small: Path) -> None:
    lines = LineFile(small / "lines")
    lines.add("first")
    lines.write_out()
    ballast = fill(small)
    lines.add("x" * 10_000)
    with pytest.raises(OSError, match="No space left on device"):
        lines.write_out()
    assert lines.path.read_text() == "first\n"
    ballast.unlink()
    lines.write_out()
    assert lines.path.read_text() == f"first\n{'x' * 10_000}\n"
    assert lines.waiting() == ()


@pytest.fixture
def full_at_sync(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A volume that takes every write, and says when a file is synced whether it has room for it."""
    is_full, fsync = False, os.fsync

    def synced(descriptor: int) -> None:
        if is_full:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(descriptor)

    def fill(now: bool) -> None:
        nonlocal is_full
        is_full = now

    monkeypatch.setattr("ddp_trainer.logs.log_files.os.fsync", synced)
    return fill


def test_lines_that_the_volume_refuses_only_when_they_are_synced_wait_again(
    tmp_path: Path, full_at_sync: Callable[[bool], None]
) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.add("first")
    lines.write_out(durable=True)
    full_at_sync(True)
    lines.add("second")
    lines.write_out()
    lines.add("third")
    with pytest.raises(OSError, match="quota"):
        lines.write_out(durable=True)
    assert lines.path.read_text() == "first\n"
    assert lines.waiting() == ("second\n", "third\n")
    assert lines.not_durable(2) == ("second\n",)
    full_at_sync(False)
    lines.add("fourth")
    lines.write_out(durable=True)
    assert lines.path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert lines.waiting() == ()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_descriptor_that_the_volume_has_made_useless_is_opened_anew(tmp_path: Path, is_dropped: bool) -> None:
    """As after a client of CephFS was reconnected (EBADF), which may drop what it had not sent."""
    lines = LineFile(tmp_path / "lines")
    lines.add("first")
    lines.write_out(durable=True)
    lines.add("second")
    lines.write_out()
    assert lines._descriptor is not None
    os.close(lines._descriptor)
    if is_dropped:
        os.truncate(lines.path, len("first\n"))
    lines.add("third")
    with pytest.raises(OSError, match="Bad file descriptor"):
        lines.write_out()
    assert lines.waiting() == ("second\n", "third\n")
    lines.write_out()
    assert lines.path.read_text() == "first\nsecond\nthird\n"
    lines.close()


def refused(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_write_that_fails_leaves_what_was_written_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "lines")
    for line in ("first", "second"):
        lines.add(line)
        lines.write_out()
    lines.add("third")
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.write", refused)
        with pytest.raises(OSError, match="Input/output error"):
            lines.write_out()
    assert lines.path.read_text() == "first\nsecond\n"
    assert lines.waiting() == ("third\n",)
    lines.write_out()
    assert lines.path.read_text() == "first\nsecond\nthird\n"


def test_a_write_that_fails_in_the_middle_and_cannot_be_taken_back_at_once_is_when_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def cut_short(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:3]) if data.startswith(b"second") else refused()

    lines = LineFile(tmp_path / "lines")
    lines.add("first")
    lines.write_out()
    lines.add("second")
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.write", cut_short)
        volume.setattr("ddp_trainer.logs.log_files.os.ftruncate", refused)
        with pytest.raises(OSError, match="Input/output error"):
            lines.write_out()
    assert lines.path.read_text() == "first\nsec"
    lines.write_out()
    assert lines.path.read_text() == "first\nsecond\n"


def test_lines_that_could_not_be_synced_stay_in_the_file_until_they_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.add("first")
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.fsync", refused)
        with pytest.raises(OSError, match="Input/output error"):
            lines.write_out(durable=True)
    assert lines.path.read_text() == "first\n"
    assert lines.not_durable(1) == ("first\n",)
    lines.write_out(durable=True)
    assert lines.path.read_text() == "first\n"
    assert lines.not_durable(1) == ()


def test_an_attempt_that_was_cut_off_takes_back_no_line_of_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = LineFile(tmp_path / "lines"), LineFile(tmp_path / "lines")
    old.add("of the first attempt")
    old.write_out(durable=True)
    old.add("x" * 100)
    old.write_out()
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.fsync", refused)
        volume.setattr("ddp_trainer.logs.log_files.os.ftruncate", refused)
        with pytest.raises(OSError, match="Input/output error"):
            old.write_out(durable=True)
    # what a client of CephFS has not sent when it is cut off is dropped
    os.truncate(old.path, len("of the first attempt\n"))
    new.add("of the second")
    new.write_out(durable=True)
    old.write_out(durable=True)
    assert old.path.read_text().splitlines() == ["of the first attempt", "of the second", "x" * 100]


def test_events_are_made_durable_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(job(tmp_path), World())
    for step in range(3):
        log.event("validated", step=step)
        settled(log)
        assert log._events.lines._unsynced == []
        assert log._events.lines._synced_size == log._events.lines.path.stat().st_size
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.write", refused)
        volume.setattr("ddp_trainer.logs.log_files.os.fsync", refused)
        log.event("validated", step=3)
        settled(log)
    assert steps(log._events.lines.path) == [0, 1, 2]
    log.close()
    assert steps(log._events.lines.path) == [0, 1, 2, 3]


def test_the_last_lines_of_a_run_are_made_durable_or_left_as_the_volume_takes_them(
    tmp_path: Path, full_at_sync: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(job(tmp_path), World())
    full_at_sync(True)
    log.event("finished", step=1)
    log.close()
    assert "events.jsonl cannot be written: Disk quota exceeded" in capsys.readouterr().err
    assert steps(tmp_path / "logs" / "digits" / "events.jsonl") == [1]


def test_lines_that_are_never_asked_to_be_durable_are_not_kept_without_end(
    tmp_path: Path, full_at_sync: Callable[[bool], None]
) -> None:
    lines = LineFile(tmp_path / "lines")
    for number in range(log_files.SYNC_LINES - 1):
        lines.add(str(number))
    full_at_sync(True)
    lines.write_out()
    lines.add("last")
    with pytest.raises(OSError, match="quota"):
        lines.write_out()
    full_at_sync(False)
    lines.write_out()
    assert lines.path.read_text().splitlines() == [*map(str, range(log_files.SYNC_LINES - 1)), "last"]
    assert lines._unsynced == []


@pytest.mark.parametrize("is_taken", [True, False])
def test_lines_are_written_after_the_thread_was_done_before_it_had_been_asked_or_took_no_more(
    tmp_path: Path, is_taken: bool
) -> None:
    class Quick(LogThread):
        """Is done before `do` returns, or leaves a job out."""

        def do(self, job: Callable[[], None]) -> bool:
            if takes:
                job()
            return takes

    takes, log = is_taken, LogFile(tmp_path / "x.jsonl", Quick(), WriteErrors())
    log.lines.add("a")
    log.write_soon()
    takes = True
    log.lines.add("b")
    log.write_soon()
    assert (tmp_path / "x.jsonl").read_text() == "a\nb\n"


def test_what_another_process_has_written_behind_lines_is_not_taken_back_with_them(
    tmp_path: Path, full_at_sync: Callable[[bool], None]
) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.add("first")
    lines.write_out()
    with lines.path.open("a") as file:
        file.write("of another\n")
    full_at_sync(True)
    lines.add("second")
    with pytest.raises(OSError, match="quota"):
        lines.write_out(durable=True)
    assert "of another\n" in lines.path.read_text()
    full_at_sync(False)
    lines.write_out(durable=True)
    assert set(lines.path.read_text().splitlines()) == {"first", "of another", "second"}


def test_a_full_volume_makes_durable_what_it_has_taken(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("ddp_trainer.logs.log_files.os.fsync", lambda descriptor: synced.append(descriptor))
    lines = LineFile(small / "lines")
    lines.add("first")
    lines.write_out()
    fill(small)
    lines.add("x" * 10_000)
    with pytest.raises(OSError, match="No space left on device"):
        lines.write_out(durable=True)
    assert synced
    assert lines.path.read_text() == "first\n"
    assert len(lines.waiting()) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_goes_on_while_no_log_can_be_written_and_says_so_once(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(job(small), World())
    log.event("started", step=0)
    ballast = fill(small)
    for step in range(1, 200):
        log.event("validated", step=step, text="x" * 100)
        log.scalars(step, {"train/loss": 1.0})
    settled(log)
    said = capsys.readouterr().err
    assert said.count("events.jsonl cannot be written: No space left on device") == 1, said
    ballast.unlink()
    log.event("finished", step=200)
    log.close()
    assert "events.jsonl can be written again" in capsys.readouterr().err
    assert steps(small / "logs" / "digits" / "events.jsonl") == list(range(201))


def test_a_log_that_is_closed_again_when_no_thread_begins_any_more_is_written_and_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(job(tmp_path), World())
    log.event("finished", step=1)
    log.close()

    def refused(thread: threading.Thread) -> None:  # as Python 3.12 has it once exit handlers run
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    log.event("late", step=2)
    log.close()
    assert capsys.readouterr().err == ""
    assert steps(tmp_path / "logs" / "digits" / "events.jsonl") == [1, 2]


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A volume on which no line is written, and no file made durable, until the event is set."""
    released, write, fsync = threading.Event(), os.write, os.fsync

    def late(act: Callable[..., int | None]) -> Callable[..., int | None]:
        return lambda *arguments: act(*arguments) if released.wait(60) else None

    monkeypatch.setattr("ddp_trainer.logs.log_files.os.write", late(write))
    monkeypatch.setattr("ddp_trainer.logs.log_files.os.fsync", late(fsync))
    yield released
    released.set()


def test_a_volume_that_hangs_holds_up_neither_a_step_nor_a_snapshot_nor_the_end(
    tmp_path: Path, hung: threading.Event, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(runlog, "CLOSE_SECONDS", 0.1)
    log = RunLog(job(tmp_path), World())
    started = time.monotonic()
    for step in range(1, 3000):
        log.losses.append(step=step, epoch=0, loss=0.5)
        log.scalars(step, {"train/loss": 0.5})
        log.event("validated", step=step)
    state = log.losses.state_dict()
    log.close()
    assert time.monotonic() - started < 30
    assert message("The volume is slow", 2).search(capsys.readouterr().err)

    hung.set()
    for step in range(3000, 3010):
        log.losses.append(step=step, epoch=0, loss=0.5)
    assert json.loads(to_json(state)) == {"step": 2999, "epoch": 0, "sum": 1499.5, "count": 2999, "waiting": []}
    settled(log)
    assert [line["step"] for line in read_losses(tmp_path / "logs" / "digits")][:2999] == list(range(1, 3000))
    assert steps(tmp_path / "logs" / "digits" / "events.jsonl") == list(range(1, 3000))


def test_the_throughput_is_that_of_the_last_steps_without_the_pauses_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("ddp_trainer.logs.runlog.time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    steps = runlog.StepLog(RunLog(job(tmp_path), World()), None)
    found = []
    for pause in (0, 0, 100, 0):
        if pause:
            steps.paused()
        clock[0] += 2 + pause
        steps.trained(10)
        found.append(steps.samples_per_second)
    assert found == [None, 5.0, 5.0, 5.0]
    steps.regrouped()
    steps.trained(10)
    assert steps.samples_per_second is None


def test_lines_added_while_the_volume_is_written_to_are_neither_lost_nor_written_twice(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    writer = threading.Thread(target=lambda: [lines.write_out(durable=True) for _ in range(200)])
    writer.start()
    for number in range(20_000):
        lines.add(str(number))
    writer.join()
    lines.write_out()
    assert lines.path.read_text() == "".join(f"{number}\n" for number in range(20_000))


RECORDING = """
import json, os
from pathlib import Path

class Settings(dict):
    def __init__(self, **given): super().__init__(given)

def init(**given):
    folder = Path(given["dir"], "wandb")
    folder.mkdir(parents=True)
    (folder / "init.json").write_text(json.dumps(given))
    return Run(folder)

class Run:
    def __init__(self, folder): self.folder, self.points = folder, []
    def log(self, values, step): self.points.append([step, values])
    def finish(self): (self.folder / "points.json").write_text(json.dumps(self.points))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a module in the place of wandb, installed or not."""

    def write(text: str) -> None:
        (tmp_path / "wandb.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        # what is imported under the name now is taken away again afterwards
        monkeypatch.setitem(sys.modules, "wandb", sys)
        monkeypatch.delitem(sys.modules, "wandb")

    return write


def test_wandb_is_set_to_stay_offline_and_gets_the_points_of_rank_0_alone(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(RECORDING)
    monkeypatch.setenv("WANDB_MODE", "online")
    for rank in (0, 1):
        log = RunLog(job(tmp_path, attempt=3), World(rank=rank, size=2), wandb={"lr": 0.1})
        log.scalars(10, {"train/loss": 0.5})
        log.close()
    said = json.loads((tmp_path / "logs/digits/wandb/init.json").read_text())
    assert (said["mode"], said["group"], said["name"]) == ("offline", "digits", "digits-attempt-3")
    assert said["config"] == {"lr": 0.1}
    assert json.loads((tmp_path / "logs/digits/wandb/points.json").read_text()) == [[10, {"train/loss": 0.5}]]


def test_tensorboard_shows_what_a_rank_writes_that_leads_for_the_second_time(tmp_path: Path) -> None:
    """With live recovery: rank 0 was lost, another one led in its place until it was replaced, and it is lost again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def leads(log: RunLog, first: int) -> None:
        log.resumed(first - 1)
        time.sleep(1.0 - time.time() % 1.0)  # files are read by the second of their names
        for step in range(first, first + 3):
            log.scalars(step, {"loss": 0.5})
        settled(log)

    place = World()
    stays = RunLog(job(tmp_path), place)
    leads(stays, 1)
    place.move(1, 2)
    stays.regrouped()
    stays.resumed(3)
    joins = RunLog(job(tmp_path), World(size=2))
    leads(joins, 4)
    joins.close()
    place.move(0, 1)
    stays.regrouped()
    leads(stays, 7)
    stays.close()
    shown = EventAccumulator(str(tmp_path / "logs" / "digits" / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("loss")] == list(range(1, 10))


def test_a_kind_of_curve_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, stand_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("class Settings: __init__ = lambda self, **given: None\n")
    log = RunLog(job(tmp_path), World(), wandb={})
    log.scalars(1, {"train/loss": 0.5})
    log.scalars(2, {"train/loss": 0.4})
    log.close()
    said = capsys.readouterr().err
    assert "OfflineWandb is left out from step 1 on: " in said
    assert said.count("is left out") == 1, said


def test_offline_wandb_without_wandb_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--wandb offline needs the package wandb, .* pip install wandb"):
        writers.check_wandb()
