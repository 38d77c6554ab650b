"""Each attempt has a losses file of its own; merged, they are the history of a run that was never broken."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.documented import message
from tests.trainer.logs.conftest import fill

from ddp_trainer.logs.__main__ import main
from ddp_trainer.logs.log_files import LogFile, LogThread, WriteErrors
from ddp_trainer.logs.losses import LossLog, read_losses
from ddp_trainer.snapshots.codec.structure import to_json

EVERY = 5
"""Steps from one snapshot to the next."""


def path_of(log_dir: Path, attempt: int) -> Path:
    return log_dir / "losses" / f"000000000001-{attempt:06d}-u.jsonl"


def begun(log_dir: Path, attempt: int, after: int = 0, state: dict[str, Any] | None = None) -> LossLog:
    log = LossLog(path_of(log_dir, attempt), attempt)
    if state is not None:
        log.load_state_dict(state)
    log.resumed(after)
    return log


def trained(log: LossLog, *steps: int) -> None:
    for step in steps:
        log.append(step=step, epoch=0, loss=1 / step)


def saved(log: LossLog) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(to_json(log.state_dict()))
    return state


def history(log_dir: Path) -> list[tuple[int, int]]:
    return [(line["step"], line["attempt"]) for line in read_losses(log_dir)]


def test_a_loss_is_read_back_to_the_last_bit_and_one_that_is_not_finite_as_null(tmp_path: Path) -> None:
    log = begun(tmp_path, 0)
    log.append(step=1, epoch=0, loss=1 / 3)
    log.append(step=2, epoch=1, loss=float("nan"), samples_per_second=1234.567)
    log.close()
    assert read_losses(tmp_path) == [
        {"step": 1, "epoch": 0, "loss": 1 / 3, "attempt": 0},
        {"step": 2, "epoch": 1, "loss": None, "attempt": 0, "samplesPerSecond": 1235.0},
    ]


def test_an_attempt_replaces_what_earlier_ones_logged_after_its_snapshot(tmp_path: Path) -> None:
    old, new = begun(tmp_path, 0), begun(tmp_path, 1, after=2)
    trained(old, 1, 2, 3, 4, 5)
    trained(new, 3)
    for log in (old, new):
        log.close()
    assert history(tmp_path) == [(1, 0), (2, 0), (3, 1)]


def test_a_fenced_attempt_that_still_runs_changes_nothing(tmp_path: Path) -> None:
    old = begun(tmp_path, 0)
    trained(old, 1, 2)
    saved(old)
    new = begun(tmp_path, 1, after=2)
    trained(new, 3)
    new.close()
    trained(old, 3, 4, 5)
    old.close()
    assert history(tmp_path) == [(1, 0), (2, 0), (3, 1)]


def test_a_restart_in_place_begins_a_line_of_its_own_after_one_that_was_cut_short(tmp_path: Path) -> None:
    log = begun(tmp_path, 0)
    trained(log, 1, 2, 3)
    log.close()
    with path_of(tmp_path, 0).open("a") as lines:
        lines.write('{"step": 4, "ep')
    again = begun(tmp_path, 0, after=1)
    trained(again, 2)
    again.close()
    assert history(tmp_path) == [(1, 0), (2, 0)]


def test_a_rank_that_writes_from_now_on_and_was_behind_writes_what_the_last_one_may_not_have_written(
    tmp_path: Path,
) -> None:
    """It takes over the state of a rank that is ahead after it has become the one that writes."""
    log = LossLog(None, 0, may_lead=True)
    trained(log, 1, 2, 3)
    ahead = LossLog(None, 0, may_lead=True)
    trained(ahead, 1, 2, 3, 4)
    log.lead(LogFile(path_of(tmp_path, 0), LogThread(), WriteErrors()))
    log.load_state_dict(ahead.state_dict())
    log.resumed(4)
    log.close()
    assert [entry["step"] for entry in read_losses(tmp_path)] == [1, 2, 3]


def test_a_new_run_under_the_same_name_starts_its_history_anew(tmp_path: Path) -> None:
    first = begun(tmp_path, 0)
    trained(first, 1, 2, 3)
    first.close()
    again = LossLog(tmp_path / "losses" / "000000000002-000000-v.jsonl", 0)
    again.resumed(0)
    trained(again, 1)
    again.close()
    assert len(read_losses(tmp_path)) == 1


def test_losses_that_a_full_volume_refuses_are_in_the_snapshot_and_in_the_next_attempts_file(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = begun(small, 0)
    trained(log, 1, 2)
    saved(log)
    ballast = fill(small)
    trained(log, *range(3, 90))
    state = log.state_dict()
    trained(log, *range(90, 100))
    refused = json.loads(to_json(state))
    assert [json.loads(line)["step"] for line in refused["waiting"]] == list(range(3, 90)), "and none of later steps"
    assert message("The volume is full", 2).search(capsys.readouterr().err)
    assert [step for step, _ in history(small)] == [1, 2]

    ballast.unlink()
    begun(small, 1, after=89, state=refused).close()
    assert [step for step, _ in history(small)] == list(range(1, 90))


def full(descriptor: int) -> None:
    """In place of fsync."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_losses_that_a_volume_refuses_when_they_are_synced_are_in_the_snapshot_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = begun(tmp_path, 0)
    trained(log, 1, 2)
    saved(log)
    with monkeypatch.context() as volume:
        volume.setattr("ddp_trainer.logs.log_files.os.fsync", full)
        trained(log, 3, 4)
        refused = saved(log)
        assert [json.loads(line)["step"] for line in refused["waiting"]] == [3, 4]
        assert [step for step, _ in history(tmp_path)] == [1, 2]
        assert log._file is not None
        log._file.write()
        assert "can be written again" not in capsys.readouterr().err
    trained(log, 5)
    assert saved(log)["waiting"] == []
    assert "can be written again" in capsys.readouterr().err
    assert history(tmp_path) == [(step, 0) for step in range(1, 6)]


def test_losses_that_another_thread_writes_after_they_could_not_be_synced_are_in_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = begun(tmp_path, 0)
    trained(log, 1, 2)
    saved(log)
    trained(log, 3, 4)
    file = log._file
    assert file is not None
    write = file.write

    def write_twice(*, durable: bool = False) -> None:
        write(durable=durable)
        trained(log, 5)
        write()  # as the log thread does at any time

    monkeypatch.setattr("ddp_trainer.logs.log_files.os.fsync", full)
    monkeypatch.setattr(file, "write", write_twice)
    assert [json.loads(line)["step"] for line in saved(log)["waiting"]] == [3, 4]


def test_an_attempt_that_could_write_nothing_at_all_is_in_the_next_ones_file(small: Path) -> None:
    first = begun(small, 0)
    trained(first, *range(1, 8))
    first.close()
    ballast = fill(small)
    second = begun(small, 1, after=5)
    trained(second, 6, 7, 8)
    refused = saved(second)
    ballast.unlink()
    begun(small, 2, after=8, state=refused).close()
    assert [step for step, _ in history(small)] == list(range(1, 9))
    assert dict(history(small))[7] == 1


@given(
    # for each attempt: steps until it is killed, and the share of what was not durable that the disk has all the same
    kills=st.lists(st.tuples(st.integers(1, 18), st.floats(0, 1), st.booleans()), max_size=6),
)
def test_killed_anywhere_the_merged_history_is_that_of_an_unbroken_run(
    kills: list[tuple[int, float, bool]],
) -> None:
    last = 30
    with tempfile.TemporaryDirectory() as folder:
        log_dir, snapshot, state, attempt = Path(folder), 0, None, 0
        for steps, survives, in_place in kills:
            log, durable, path = begun(log_dir, attempt, snapshot, state), 0, path_of(log_dir, attempt)
            durable = path.stat().st_size if path.exists() else 0
            for step in range(snapshot + 1, min(snapshot + steps, last) + 1):
                trained(log, step)
                if step % EVERY == 0:
                    snapshot, state, durable = step, saved(log), path.stat().st_size
            log.close()
            # SIGKILL and a power cut: any part of what was not synced is there, cut anywhere in a line
            os.truncate(path, durable + int((path.stat().st_size - durable) * survives))
            attempt += not in_place
        log = begun(log_dir, attempt, snapshot, state)
        trained(log, *range(snapshot + 1, last + 1))
        log.close()
        found = read_losses(log_dir)
    assert [(line["step"], line["loss"]) for line in found] == [(step, 1 / step) for step in range(1, last + 1)]


@given(st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9).map(lambda step: -step - 1))), max_size=4))
def test_the_history_is_that_of_all_lines_in_their_order_whatever_they_are(files: list[list[int]]) -> None:
    """A number is the step of a line, a negative one the step after which a part begins."""
    expected: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for attempt, steps in enumerate(files):
            lines = []
            for step in steps:
                if step < 0:
                    expected = {known: of for known, of in expected.items() if known <= -step - 1}
                    lines.append({"attempt": attempt, "resumedAfter": -step - 1})
                else:
                    expected[step] = attempt
                    lines.append({"step": step, "attempt": attempt})
            path = path_of(Path(folder), attempt)
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert history(Path(folder)) == sorted(expected.items())


def test_a_long_run_is_printed_without_all_of_it_in_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for attempt in range(4):
        log = begun(tmp_path, attempt, after=2000 * attempt)
        trained(log, *range(2000 * attempt + 1, 2000 * attempt + 2501))
        log.close()
    tracemalloc.start()
    try:
        assert main([str(tmp_path)]) == 0
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(capfd.readouterr().out.splitlines()) == 8_500
    assert most < 1 << 20, "8,500 losses are more than 3 MB"


@pytest.mark.processes
def test_the_command_prints_the_merged_losses_without_torch(tmp_path: Path) -> None:
    log = begun(tmp_path, 0)
    trained(log, 1, 2)
    log.close()
    trainer = Path(__file__).parents[3] / "trainer_image"
    script = "import runpy, sys; runpy.run_module('ddp_trainer.logs', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {script}", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(trainer)}, capture_output=True, text=True)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [1, 2], done.stderr
    command[-1] = str(tmp_path / "elsewhere")
    wrong = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(trainer)}, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"there is no {tmp_path}/elsewhere/losses: name the job's, such as /mnt/shared/logs/digits\n",
    )
