"""A program on one rank that saves itself: which checkpoints it gets back, and what is recorded of them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from torch.utils.data import DataLoader

from ddp_trainer.client.run import Run
from ddp_trainer.contract.exit_codes import LossNotFinite, UserError
from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.logs.losses import read_losses
from ddp_trainer.rank.observe import close_observer, observe
from ddp_trainer.snapshots.trust.names import step_directory


def test_a_program_that_saves_itself_goes_on_from_its_newest_checkpoint(attach: Any) -> None:
    run = attach()
    assert (run.latest(), run.resume()) == (None, 0)
    due = []
    for number in range(1, 6):
        run.step_end()
        due.append(run.should_save())
        with run.checkpoint() as folder:
            (folder / "state.txt").write_text(f"step {number}")
    assert due == [False, True, False, True, False]  # every 2 steps, as the job says
    run = attach()
    assert run.resume() == 5
    latest = run.latest()
    assert (latest.name, (latest / "state.txt").read_text()) == ("checkpoint-000000000005", "step 5")
    assert sorted(path.name for path in latest.parent.glob("checkpoint-*"))[0] == "checkpoint-000000000004"


def save(run: Run, step: int | None = None, text: str = "") -> None:
    with run.checkpoint(step) as folder:
        (folder / "state.txt").write_text(text)


def test_the_job_says_how_many_checkpoints_stay_and_which_ones_stay_for_good(attach: Any) -> None:
    run = attach(environ={"DDPJOB_SNAPSHOT_KEEP": "1", "DDPJOB_SNAPSHOT_KEEP_EVERY": "2"})
    run.resume()
    for number in range(1, 6):
        save(run, number)
    kept = sorted(path.name for path in run.latest().parent.glob("checkpoint-*"))
    assert kept == [step_directory(number, "checkpoint") for number in (2, 4, 5)]


def test_an_epoch_whose_end_was_not_known_at_its_last_step_is_saved(attach: Any) -> None:
    run = attach(environ={"DDPJOB_SNAPSHOT_EVERY": "2epochs"})
    run.resume()
    due = []
    for _ in range(4):
        run.step_end()
        due.append(run.should_save())
        run.epoch_ends()
        due.append(run.should_save())
        if run.should_save():
            save(run)
    assert due == 2 * [False, False, False, True]
    assert run.epoch == 4
    run.step_end()
    run.stop()
    run.epoch_ends()
    assert run.should_save(), "the stop asks for it, and the epoch does not take that back"


def test_a_second_checkpoint_of_a_step_is_an_error_and_the_first_one_stays(attach: Any) -> None:
    run = attach()
    run.resume()
    save(run, 3, "first")
    with pytest.raises(UserError, match=r"step 3 has a checkpoint of this run already.* pass step=…"):
        save(run, 3, "second")
    assert (run.latest() / "state.txt").read_text() == "first"
    run = attach()
    save(run, 3, "of the next attempt, whose step 3 is the same")
    assert (run.latest() / "state.txt").read_text() == "first"


def test_a_step_whose_checkpoint_would_not_be_found_is_refused(attach: Any) -> None:
    """As of a program that counts tokens."""
    run = attach()
    run.resume()
    save(run, 10**12 - 1)
    assert run.latest().name == "checkpoint-999999999999"
    with pytest.raises(UserError, match="from 0 to 999999999999; count optimizer steps, not tokens"):
        save(run, 10**12)


def test_a_run_goes_on_from_the_checkpoint_that_the_program_has_loaded(attach: Any) -> None:
    run = attach()
    run.resume()
    save(run, 3)
    save(run, 5)
    run = attach()
    latest = run.latest()
    assert latest.name == "checkpoint-000000000005"
    (latest / "state.txt").write_text("damaged after it was verified")
    assert (run.latest(), run.resume()) == (latest, 5)


def test_a_save_that_has_been_made_is_no_longer_asked_for(attach: Any) -> None:
    run = attach()
    run.resume()
    run.step_end()
    run.step_end()
    assert run.should_save()
    save(run)
    assert not run.should_save()


def test_a_save_is_asked_for_until_it_is_made(attach: Any) -> None:
    """By a program that saves after its validations alone, and counts steps of its own."""
    run = attach()
    run.resume()
    due = []
    for _ in range(6):
        run.step_end()
        due.append(run.should_save())
        if run.step % 3 == 0 and run.should_save():
            save(run, 100 + run.step)
    assert due == [False, True, True, True, True, True]
    assert not run.should_save()


def test_a_stopped_run_that_saves_itself_ends_with_its_log_closed(attach: Any) -> None:
    before = set(threading.enumerate())
    run = attach()
    run.resume()
    signal.raise_signal(signal.SIGTERM)
    while not run.should_stop():
        run.step_end()
    save(run)
    (logs,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "logs")
    run.finish()
    assert not logs.is_alive()


def test_the_time_of_a_checkpoint_counts_once(attach: Any, tmp_path: Path) -> None:
    run = attach()
    run.resume()
    save(run, 1)
    (beat,) = read_heartbeats(tmp_path / "run")
    counters = beat["counters"]
    assert beat["saveSeconds"] == counters["saveSeconds"]["sum"] > 0
    assert counters["stallSeconds"]["sum"] == 0, "it is in the phase `save`"


def test_a_checkpoint_is_on_record_in_the_status(attach: Any, tmp_path: Path) -> None:
    run = attach()
    run.resume()
    with run.checkpoint(12) as folder:
        (beat,) = read_heartbeats(tmp_path / "run")
        assert beat["phase"] == "save"
        (folder / "state").touch()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert (beat["snapshot"]["step"], beat["snapshot"]["verified"], beat["counters"]["saves"]) == (
        12,
        True,
        {"saved": 1},
    )


def test_a_program_that_saves_itself_is_still_observed_and_each_step_counts_once(attach: Any, tmp_path: Path) -> None:
    heartbeat_dir(tmp_path / "run").mkdir(parents=True)
    observe(Heartbeat(heartbeat_dir(tmp_path / "run"), observed=True), world_size=1)
    try:
        model, optimizer = model_and_optimizer()
        run = attach(total_steps=9)
        run.resume()
        for _ in range(3):
            loss = step(model, optimizer)
            run.step_end(loss)
        with run.checkpoint() as folder:
            (folder / "state").touch()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert (beat["step"], beat["totalSteps"], beat["counters"]["steps"]) == (3, 9, 3)
    assert (beat["snapshot"]["step"], beat["observed"]) == (3, True)
    assert beat["loss"] == pytest.approx(float(loss.detach()))


def test_an_observed_program_is_judged_by_the_losses_that_it_passes(attach: Any, tmp_path: Path) -> None:
    heartbeat_dir(tmp_path / "run").mkdir(parents=True)
    observe(Heartbeat(heartbeat_dir(tmp_path / "run"), observed=True), world_size=1, non_finite_loss="Stop")
    try:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        run = attach(environ={"DDPJOB_NON_FINITE_LOSS": "Stop"})
        run.resume()
        (parameter * torch.inf).sum().backward()
        optimizer.step()
        run.step_end(0.5)
        run.step_end(torch.nan)
        with pytest.raises(LossNotFinite, match="the loss of step 2 is nan"):
            run.finish()
    finally:
        close_observer()


def test_a_loss_is_recorded_with_the_throughput_that_was_observed(attach: Any, tmp_path: Path) -> None:
    heartbeat_dir(tmp_path / "run").mkdir(parents=True)
    observe(Heartbeat(heartbeat_dir(tmp_path / "run"), observed=True), world_size=1)
    try:
        model, optimizer = model_and_optimizer()
        run = attach()
        run.resume()
        for _ in DataLoader(torch.ones(12, 4), batch_size=2):  # type: ignore[arg-type]
            run.step_end(step(model, optimizer))
        run.finish()
    finally:
        close_observer()
    (folder,) = tmp_path.rglob("losses")
    rates = {entry["step"]: entry.get("samplesPerSecond") for entry in read_losses(folder.parent)}
    assert list(rates) == [1, 2, 3, 4, 5, 6]
    assert all(rates[step] > 0 for step in (3, 4, 5, 6)), rates
