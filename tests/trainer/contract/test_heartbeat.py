"""What a rank leaves for the launcher, without torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, phase_seconds, read_heartbeats
from ddp_trainer.contract.histograms import BUCKETS

CONTRACT = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Loss:
    """A one-element tensor as far as the heartbeat is concerned; counts how often it is read."""

    def __init__(self, value: float, device: str) -> None:
        self.value, self.reads = value, 0
        self.device = type("Device", (), {"type": device})

    def detach(self) -> Loss:
        return self

    def __float__(self) -> float:
        self.reads += 1
        return self.value


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def beat(tmp_path, clock):
    heartbeat = Heartbeat(heartbeat_dir(tmp_path), rank=3, local_rank=1, clock=clock)
    heartbeat.read = lambda: read_heartbeats(tmp_path)[0]
    return heartbeat


def test_a_heartbeat_has_the_fields_of_the_contract(beat):
    beat.enter("init")
    section = CONTRACT.split("### Heartbeats")[1].split("## 5.")[0]
    fields = re.findall(r'"(\w+)"', section.split("}`")[0])
    assert set(beat.read()) == set(fields)
    assert (beat.read()["rank"], beat.read()["localRank"], beat.read()["pid"]) == (3, 1, os.getpid())


def test_steps_are_written_at_most_four_times_a_second_and_a_change_of_phase_at_once(beat, clock):
    beat.enter("train")
    for step in (1, 2, 3, 4):
        clock.now += 0.01
        beat.step(step=step, samples=10 * step)
    assert beat.read()["samples"] == 20  # the first two tell the watchdog what a step is
    clock.now += 0.25
    beat.step(step=5, samples=50)
    assert beat.read()["samples"] == 50
    beat.step(step=6, samples=60)
    beat.enter("save")
    assert (beat.read()["samples"], beat.read()["phase"]) == (60, "save")


def test_a_long_run_writes_once_a_second_and_counts_every_step(beat, clock):
    beat.enter("train")
    beat.step(step=1, samples=10)
    beat.step(step=2, samples=20)
    clock.now += 100
    beat.step(step=3, samples=30)
    for step in range(4, 14):
        clock.now += 0.099
        beat.step(step=step, samples=10 * step)
    assert beat.read()["samples"] == 30
    clock.now += 0.05
    beat.beat()
    found = beat.read()
    assert (found["samples"], found["counters"]["samples"], found["counters"]["steps"]) == (130, 130, 13)
    assert found["counters"]["stepSeconds"]["counts"][BUCKETS.index(0.1)] == 10
    assert found["stepSecondsMedian"] == pytest.approx(0.099)


def test_the_number_of_the_last_step_is_never_late(beat, tmp_path):
    beat.enter("train")
    for step in range(1, 8):
        beat.step(step=step)
        assert beat.read()["step"] == step
    (heartbeat_dir(tmp_path) / "rank-3.step").write_bytes(b"cut")
    assert beat.read()["step"] < 7  # a file that cannot be read leaves the heartbeat as it was written


def test_the_epochs_at_the_end_are_not_those_of_the_last_step(beat, clock):
    beat.enter("train")
    for step in range(1, 5):
        clock.now += 0.01
        beat.step(step=step, epoch=2)
    beat.epochs_are(3)
    beat.enter("done")
    assert (beat.read()["step"], beat.read()["epoch"]) == (4, 3)


def test_the_p99_of_step_times_leaves_out_saves_and_validation(beat, clock):
    beat.enter("train")
    for step in range(1, 100):
        clock.now += 0.05
        beat.step(step=step)
    beat.enter("validate")
    clock.now += 60
    beat.enter("train")
    clock.now += 0.05
    beat.step(step=100)
    beat.flush()
    assert beat.read()["stepSecondsP99"] == pytest.approx(0.05)
    assert beat.read()["counters"]["stepSeconds"]["sum"] == pytest.approx(98 * 0.05)


def test_the_median_step_and_wait_for_data_are_not_moved_by_one_that_is_long(beat, clock):
    beat.enter("train")
    for step, wait in enumerate([0.01] * 9 + [30.0], start=1):
        beat.waited_for_data(wait)
        clock.now += 0.04 + wait
        beat.step(step=step)
    beat.flush()
    assert beat.read()["stepSecondsMedian"] == pytest.approx(0.05)
    assert beat.read()["dataSecondsMedian"] == 0.01
    waits = beat.read()["counters"]["dataSeconds"]
    assert (sum(waits["counts"]), waits["sum"]) == (10, pytest.approx(30.09))


def test_a_wait_for_data_that_nobody_measures_is_not_counted_as_none(beat):
    beat.enter("train")
    beat.step(step=1)
    beat.flush()
    assert "dataSeconds" not in beat.read()["counters"]


def test_steps_without_an_update_are_counted_by_cause_and_known_before_the_first(beat):
    beat.skipped_steps("overflow", 0)
    beat.enter("train")
    assert beat.read()["counters"]["skippedSteps"] == {"overflow": 0}
    beat.skipped_steps("overflow")
    beat.skipped_steps("rollback")
    beat.flush()
    assert beat.read()["counters"]["skippedSteps"] == {"overflow": 1, "rollback": 1}


def test_the_median_of_the_passes_is_that_of_the_last_five(beat):
    for seconds in (9.0, 9.0, 0.1, 0.2, 0.2, 0.3, 9.0):
        beat.passes_took(seconds)
    beat.flush()
    assert beat.read()["passesSecondsMedian"] == 0.2


def test_a_thread_that_saves_is_no_sign_of_life(beat, clock):
    beat.enter("train")
    clock.now += 50
    beat.snapshot(100, 1763703999.0, True, size=4096, stall_seconds=0.1, save_seconds=2.0, result="saved")
    assert beat.read()["time"] == 1000.0
    assert beat.read()["snapshot"] == {"step": 100, "time": 1763703999.0, "verified": True, "bytes": 4096}
    assert beat.read()["counters"]["saves"] == {"saved": 1}


def test_a_loss_on_an_accelerator_is_read_at_most_once_a_second(beat, clock):
    losses = [Loss(float(step), "cuda") for step in range(20)]
    beat.enter("train")
    for step, loss in enumerate(losses, start=1):
        clock.now += 0.2
        beat.step(step=step, loss=loss)
    assert sum(loss.reads for loss in losses) == 4


def test_a_loss_is_only_read_when_a_write_is_due(beat, clock):
    losses = [Loss(float(step), "cpu") for step in range(1, 100)]
    beat.enter("train")
    for step, loss in enumerate(losses, start=1):
        clock.now += 0.01
        beat.step(step=step, loss=loss)
    assert sum(loss.reads for loss in losses) <= 12


def test_a_loss_that_is_shown_in_the_place_of_that_of_the_step_hides_it_from_no_check(beat, clock):
    beat.step(step=1, loss=Loss(float("nan"), "cuda"), shown_loss=0.5)
    assert (beat.read()["loss"], beat.loss, str(beat.loss_of_step)) == (0.5, 0.5, "nan")
    clock.now += 2
    beat.step(step=2, loss=2.5)
    assert (beat.read()["loss"], beat.loss_of_step) == (2.5, 2.5)
    beat.step(step=3, shown_loss=0.5)
    beat.last_loss_is(1.5)
    beat.flush()
    assert beat.read()["loss"] == 1.5


def test_counters_count_this_process_only(beat, clock):
    beat.resumed(100, samples=6400)
    for step in (101, 102):
        beat.step(step=step, samples=step * 64)
    beat.flush()
    assert beat.read()["counters"]["steps"] == 2
    assert beat.read()["counters"]["samples"] == 128
    assert beat.read()["resumedFromStep"] == 100


def test_a_loss_that_is_not_finite_is_still_strict_json(beat, tmp_path):
    beat.step(step=1, loss=float("nan"))
    beat.metrics(eval_loss=float("inf"))
    text = (heartbeat_dir(tmp_path) / "rank-3.json").read_text()
    parsed = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (parsed["loss"], parsed["metrics"]) == (None, {"eval_loss": None})


def test_without_a_launcher_nothing_is_written_and_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat.from_env({})
    heartbeat.enter("train")
    heartbeat.step(step=1, loss=0.5)
    heartbeat.snapshot(1, 0.0, True, result="saved")
    heartbeat.metrics(a=1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_does_not_stop_training(tmp_path):
    (tmp_path / "heartbeats").write_text("a file is in the way")
    heartbeat = Heartbeat.from_env({"DDPJOB_RUN_DIR": str(tmp_path), "RANK": "0", "LOCAL_RANK": "0"})
    heartbeat.enter("train")
    heartbeat.step(step=1)


def test_an_unknown_phase_is_refused(beat):
    with pytest.raises(ValueError, match="'traning' is not one of init"):
        beat.enter("traning")


def test_the_reader_skips_what_it_does_not_understand(beat, tmp_path):
    beat.enter("init")
    directory = heartbeat_dir(tmp_path)
    (directory / "rank-0.json").write_text("{")
    (directory / "rank-1.json").write_text('{"version": 2, "rank": 1}')
    (directory / "rank-2.json").write_text("[]")
    assert [found["rank"] for found in read_heartbeats(tmp_path)] == [3]


def test_every_second_belongs_to_one_phase_and_what_a_snapshot_held_up_is_no_training(tmp_path):
    now = [100.0]
    heartbeat = Heartbeat(heartbeat_dir(tmp_path), clock=lambda: now[0])
    for phase, seconds in (("load", 2.0), ("first_step", 1.0), ("train", 5.0), ("validate", 0.5), ("train", 4.0)):
        heartbeat.enter(phase)
        now[0] += seconds
    heartbeat.beat()
    heartbeat.snapshot(10, 1.0, True, stall_seconds=1.5)
    (beat,) = read_heartbeats(tmp_path)
    spent = {"init": 0.0, "load": 2.0, "first_step": 1.0, "train": 7.5, "validate": 0.5, "save": 1.5}
    assert phase_seconds(beat, now[0]) == spent
    assert phase_seconds(beat, now[0] + 60.0) == spent, "silence is not reported"
    assert phase_seconds(None, now[0]) == {}


def test_a_process_in_the_place_of_another_goes_on_with_the_seconds_of_the_attempt(tmp_path):
    now = [100.0]
    heartbeat = Heartbeat(heartbeat_dir(tmp_path), clock=lambda: now[0])
    heartbeat.enter("load")
    now[0] += 3.0
    heartbeat.goes_on_after({"load": 1.0, "train": 50.0, "save": 2.0})
    now[0] += 0.5
    heartbeat.enter("train")
    now[0] += 4.0
    spent = {"load": 1.5, "train": 54.0, "save": 2.0}
    assert heartbeat.seconds() == spent
    heartbeat.beat()
    assert phase_seconds(read_heartbeats(tmp_path)[0], now[0]) == spent
