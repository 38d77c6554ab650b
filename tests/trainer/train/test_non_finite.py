"""A loss that is not finite: what is done about it, and which snapshots are left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.trainer.documented import message

from ddp_trainer.contract.exit_codes import LossNotFinite, RollBack
from ddp_trainer.contract.outcomes import classify
from ddp_trainer.snapshots.trust.store import SnapshotStore, retained

FLAGS = ("--task=seeded_tasks:Unstable", "--global-batch=4", "--validate-every=never", "--optimizer=sgd")
EVERY = {"DDPJOB_SNAPSHOT_EVERY": "2steps", "DDPJOB_SNAPSHOT_KEEP": "2"}


def unstable(step: int, *more: str) -> tuple[str, ...]:
    return (*FLAGS, f"--task-options=step={step}", "--max-steps=16", *more)


def marked(volume: Any) -> dict[int, bool]:
    """Steps with a snapshot, and whether its manifest says that the loss was finite."""
    return {step: volume_manifest(volume, step)["lossIsFinite"] for step in volume.snapshot_steps()}


def volume_manifest(volume: Any, step: int) -> dict[str, Any]:
    return dict(json.loads((volume.checkpoints / f"step-{step:012d}/manifest.json").read_text()))


def test_a_run_that_only_warns_says_so_and_keeps_its_last_finite_snapshots(train_here, capfd) -> None:
    volume = train_here(*unstable(7), **EVERY)
    (event,) = volume.events("non_finite_loss")
    assert (event["step"], event["loss"]) == (7, "nan")
    assert len(message("The loss is NaN or infinite").findall(capfd.readouterr().out)) == 1
    (beat,) = volume.beats()
    assert beat["nonFiniteLoss"] == {"step": 7, "steps": 10}
    assert beat["counters"]["nonFiniteLosses"] == 10
    assert marked(volume) == {4: True, 6: True, 16: False}
    newest = SnapshotStore(volume.checkpoints, keep=1, fence=None).list()[0]
    assert (newest.step, newest.loss_is_finite) == (16, False)


def test_a_loss_that_is_finite_again_is_reported_and_its_snapshots_count(train_here) -> None:
    volume = train_here(*unstable(6, "--task-options=heals=true"), **EVERY)
    assert [event["step"] for event in volume.events("finite_loss")] == [7]
    assert volume.beats()[0]["nonFiniteLoss"] is None
    assert marked(volume) == {14: True, 16: True}


def test_a_run_that_stops_fails_at_that_step_and_saves_nothing_of_it(train_here) -> None:
    with pytest.raises(LossNotFinite, match="the loss of step 8 is nan") as stopped:
        train_here(*unstable(8), **EVERY, DDPJOB_NON_FINITE_LOSS="Stop")
    assert classify(stopped.value) == (64, "LossNotFinite")
    volume = train_here(*unstable(0), **EVERY)
    assert volume.events("resumed")[0]["step"] == 6
    assert not [event for event in volume.events("snapshot_saved") if event["attempt"] == 0 and event["step"] > 6]


def test_a_run_that_stops_saves_no_weights_that_a_finite_loss_has_made_nan(train_here) -> None:
    # the gradient of step 6 is, and nobody looks at its norm
    flags = unstable(6, "--task-options=gradient=true")
    with pytest.raises(LossNotFinite, match=message("The loss is NaN or infinite", 3)):
        train_here(*flags, **EVERY, DDPJOB_NON_FINITE_LOSS="Stop")
    assert train_here(*unstable(0), **EVERY).events("resumed")[0]["step"] == 4


def test_a_snapshot_with_weights_that_are_not_finite_says_so(train_here) -> None:
    volume = train_here(*unstable(6, "--task-options=gradient=true"), **EVERY)
    assert marked(volume) == {2: True, 4: True, 16: False}
    (event,) = volume.events("non_finite_loss")
    assert event["step"] == 6


def test_a_rollback_resumes_before_the_step_and_skips_its_batch_and_the_one_before(train_here) -> None:
    rollback = {**EVERY, "DDPJOB_NON_FINITE_LOSS": "Rollback"}
    with pytest.raises(RollBack, match=message("The loss is NaN or infinite", 1)) as rolled_back:
        train_here(*unstable(9), **rollback)
    assert classify(rolled_back.value) == (1, "LossNotFinite")
    # that of step 8 may hold what made the loss of step 9
    volume = train_here(*unstable(9), **rollback)
    assert volume.events("resumed")[0]["step"] == 6
    assert all(loss is not None for loss in volume.losses().values())
    assert [event["step"] for event in volume.events("step_skipped")] == [8, 9]
    (beat,) = volume.beats()
    assert beat["counters"]["skippedSteps"] == {"rollback": 2}
    assert volume.losses().keys() == set(range(1, 17)) - {8, 9}
    assert volume.newest_manifest()["step"] == 16


def test_a_sample_that_makes_every_loss_nan_is_skipped_in_the_first_step_too(train_here) -> None:
    rollback = {**EVERY, "DDPJOB_NON_FINITE_LOSS": "Rollback"}
    with pytest.raises(RollBack, match=r"the loss of step 1 is nan: .* and skips step 1 "):
        train_here(*unstable(1), **rollback)
    assert train_here(*unstable(1), **rollback).losses().keys() == set(range(2, 17))


def test_a_failure_after_a_rollback_resumes_to_the_same_losses(train_here) -> None:
    rollback = {**EVERY, "DDPJOB_NON_FINITE_LOSS": "Rollback"}
    with pytest.raises(RollBack):
        train_here(*unstable(9), **rollback)
    volume = train_here(*unstable(9), **rollback)
    unbroken = volume.losses()
    for step in volume.snapshot_steps():
        if step > 14:  # as if the attempt had ended after step 15
            (volume.checkpoints / f"step-{step:012d}").rename(volume.checkpoints / "gone")
    assert train_here(*unstable(9), **rollback).losses() == unbroken
    assert volume.events("resumed")[-1]["step"] == 14


def test_the_fourth_rollback_is_a_failure(train_here) -> None:
    # with a learning rate like this, no order of the data helps
    flags = (*unstable(0), "--lr=1e38", "--weight-decay=10")
    for _ in range(3):
        with pytest.raises(RollBack):
            train_here(*flags, DDPJOB_NON_FINITE_LOSS="Rollback")
    with pytest.raises(LossNotFinite, match="after 3 rollbacks, each without the batches before it"):
        train_here(*flags, DDPJOB_NON_FINITE_LOSS="Rollback")


def test_a_gradient_that_is_not_finite_is_found_before_its_snapshot_counts(train_here) -> None:
    flags = unstable(6, "--task-options=gradient=true", "--clip-norm=1")
    with pytest.raises(LossNotFinite, match="gradient norm of step 6 is nan"):
        train_here(*flags, **EVERY, DDPJOB_NON_FINITE_LOSS="Stop")
    assert train_here(*unstable(0, "--clip-norm=1"), **EVERY).events("resumed")[0]["step"] == 4


def test_a_step_that_the_gradient_scaler_skips_is_no_loss_and_does_not_move_the_schedule(train_here) -> None:
    fp16 = ("--precision=fp16", "--scheduler=linear", "--max-steps=4", "--clip-norm=1")
    # a scale that overflows at once
    volume = train_here(*FLAGS, "--task-options=step=0", *fp16, "--scaler-init-scale=1e38")
    assert volume.events("non_finite_loss") == []
    state = json.loads((volume.newest / "state.json").read_text())["states"]
    skipped = state["precision"]["skipped_steps"]
    assert skipped > 0
    assert state["scheduler"]["last_epoch"] == 4 - skipped
    (beat,) = volume.beats()
    assert beat["counters"]["skippedSteps"] == {"overflow": skipped}
    assert beat["snapshot"]["bytes"] == sum(entry["bytes"] for entry in volume.newest_manifest()["files"].values())


@pytest.mark.parametrize(
    ("not_finite", "every", "stay"),
    [
        pytest.param((), None, {40, 50}, id="the newest"),
        pytest.param({30, 40, 50}, None, {10, 20, 50}, id="finite ones, and the newest to resume from"),
        pytest.param({10, 20, 30, 40, 50}, None, {50}, id="none finite"),
        pytest.param((), 25, {30, 40, 50}, id="the first at or after each multiple"),
        pytest.param((), 20, {20, 40, 50}, id="a multiple itself"),
    ],
)
def test_what_is_retained(not_finite, every, stay) -> None:
    steps = (10, 20, 30, 40, 50)
    assert retained(steps, lambda step: step not in not_finite, keep=2, every=every) == stay
