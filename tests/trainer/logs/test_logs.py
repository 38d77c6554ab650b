"""What is left to read: whole, in order, each step once, also where the volume was full for a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.trainer.documented import message

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.logs import runlog, writers
from ddp_trainer.logs.line_file import LineFile
from ddp_trainer.logs.runlog import LossLog, RunLog
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec.structure import to_json


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs of one page, so that the second line is more than it holds."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "ddpjob-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free; the file that takes them."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


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


def test_a_life_that_is_believed_dead_appends_to_nobodys_file(tmp_path: Path) -> None:
    old, new = (LossLog(tmp_path / "losses.jsonl", attempt=attempt) for attempt in (0, 1))
    for step in (1, 2, 3):
        old.append(step=step, epoch=0, loss=0.5)
    old.flush()
    new.load_state_dict({"step": 2})
    old.append(step=4, epoch=0, loss=0.5)
    old.flush()
    new.append(step=3, epoch=0, loss=0.25)
    new.close()
    old.close()
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (3, 1)]


def test_a_life_that_had_only_resumed_appends_to_nobodys_file_either(tmp_path: Path) -> None:
    first, old, new = (LossLog(tmp_path / "losses.jsonl", attempt=attempt) for attempt in (0, 1, 2))
    for step in (1, 2, 3):
        first.append(step=step, epoch=0, loss=0.5)
    first.close()
    old.load_state_dict({"step": 2})
    new.load_state_dict({"step": 2})
    for log in (old, new):
        log.append(step=3, epoch=0, loss=0.25)
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (3, 2)]


def test_a_log_is_rewound_on_a_full_volume_too(small: Path) -> None:
    log = LossLog(small / "losses.jsonl", attempt=0)
    for step in range(1, 200):
        log.append(step=step, epoch=0, loss=0.5)
    log.close()
    fill(small)
    again = LossLog(small / "losses.jsonl", attempt=1)
    again.load_state_dict({"step": 2})
    assert steps(small / "losses.jsonl") == [1, 2]
    assert sorted(path.name for path in small.iterdir()) == ["ballast", "losses.jsonl"]


def test_losses_that_a_full_volume_refuses_are_in_the_snapshot_and_back_in_the_log_after_a_resume(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small / "losses.jsonl"
    log = LossLog(path, attempt=0)
    for step in (1, 2):
        log.append(step=step, epoch=0, loss=0.1 * step)
    log.flush()
    ballast = fill(small)
    for step in range(3, 90):
        log.append(step=step, epoch=0, loss=0.1 * step)
    state = json.loads(to_json(log.state_dict()))
    assert steps(path) == [1, 2]
    assert message("The volume is full", 2).search(capsys.readouterr().err)

    ballast.unlink()
    resumed = LossLog(path, attempt=1)
    resumed.load_state_dict(state)
    assert steps(path) == list(range(1, 90))
    resumed.load_state_dict(state)
    assert steps(path) == list(range(1, 90)), "lines that are there already are not written again"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_goes_on_while_no_log_can_be_written_and_says_so_once(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(small / "job", World())
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
    assert steps(small / "job" / "events.jsonl") == list(range(201))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A volume on which no line is written, and no file made durable, until the event is set."""
    released, write, fsync = threading.Event(), os.write, os.fsync

    def late(act: Callable[..., int | None]) -> Callable[..., int | None]:
        return lambda *arguments: act(*arguments) if released.wait(60) else None

    monkeypatch.setattr("ddp_trainer.logs.line_file.os.write", late(write))
    monkeypatch.setattr("ddp_trainer.logs.line_file.os.fsync", late(fsync))
    yield released
    released.set()


def test_a_volume_that_hangs_holds_up_neither_a_step_nor_a_snapshot_nor_the_end(
    tmp_path: Path, hung: threading.Event, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(runlog, "CLOSE_SECONDS", 0.1)
    log = RunLog(tmp_path / "job", World())
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
    assert json.loads(to_json(state)) == {"step": 2999, "waiting": []}
    settled(log)
    assert steps(tmp_path / "job" / "losses.jsonl")[:2999] == list(range(1, 3000))
    assert steps(tmp_path / "job" / "events.jsonl") == list(range(1, 3000))


def test_only_lines_of_its_own_steps_are_saved_with_a_snapshot_that_the_volume_refuses(small: Path) -> None:
    log = LossLog(small / "losses.jsonl", attempt=0)
    log.append(step=1, epoch=0, loss=0.5)
    log.flush()
    fill(small)
    for step in range(2, 90):
        log.append(step=step, epoch=0, loss=0.5)
    state = log.state_dict()
    for step in range(90, 100):
        log.append(step=step, epoch=0, loss=0.5)
    saved = json.loads(to_json(state))
    assert [json.loads(line)["step"] for line in saved["waiting"]] == list(range(2, 90))


def test_lines_added_while_the_volume_is_written_to_are_neither_lost_nor_written_twice(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    writer = threading.Thread(target=lambda: [lines.write_out(durable=True) for _ in range(200)])
    writer.start()
    for number in range(20_000):
        lines.add(str(number))
    writer.join()
    lines.write_out()
    assert lines.path.read_text() == "".join(f"{number}\n" for number in range(20_000))


def test_a_line_that_a_crash_cut_short_is_dropped_with_all_after_the_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    log = LossLog(path, attempt=0)
    for step in (1, 2, 3):
        log.append(step=step, epoch=0, loss=1 / 3)
    log.close()
    with path.open("a") as lines:
        lines.write('{"step": 4, "ep')
    again = LossLog(path, attempt=1)
    again.load_state_dict({"step": 2})
    assert steps(path) == [1, 2]
    assert json.loads(path.read_text().splitlines()[0])["loss"] == 1 / 3


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


def test_wandb_is_told_to_stay_offline_and_gets_the_points_of_rank_0_alone(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(RECORDING)
    monkeypatch.setenv("WANDB_MODE", "online")
    for rank in (0, 1):
        log = RunLog(tmp_path / "logs" / "digits", World(rank=rank, size=2), attempt=3, wandb={"lr": 0.1})
        log.scalars(10, {"train/loss": 0.5})
        log.close()
    said = json.loads((tmp_path / "logs/digits/wandb/init.json").read_text())
    assert (said["mode"], said["group"], said["name"]) == ("offline", "digits", "digits-attempt-3")
    assert said["config"] == {"lr": 0.1}
    assert json.loads((tmp_path / "logs/digits/wandb/points.json").read_text()) == [[10, {"train/loss": 0.5}]]


def test_a_kind_of_curve_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, stand_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("class Settings: __init__ = lambda self, **given: None\n")
    log = RunLog(tmp_path / "logs", World(), wandb={})
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
