"""A loss that is not finite in a loop of one's own: stopped, rolled back, and recorded with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from tests.trainer.snapshots.unreadable import is_unreadable

from ddp_trainer.client.finite import are_finite
from ddp_trainer.client.run import Run
from ddp_trainer.contract.exit_codes import LossNotFinite, RollBack
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import Manifest


def test_a_loop_of_ones_own_is_stopped_and_rolled_back_by_its_losses(attach: Any, tmp_path: Path) -> None:
    def train(policy: str, losses: list[float]) -> Run:
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, environ={"DDPJOB_NON_FINITE_LOSS": policy})
        try:
            for number in range(run.resume(), len(losses)):
                step(model, optimizer)
                run.step_end(losses[number])
        except Exception as error:
            run.emergency(error)  # as the worker does
            raise
        run.finish()
        return run

    broken = [0.5] * 4 + [float("inf")] + [0.5] * 5
    with pytest.raises(LossNotFinite, match="the loss of step 5 is inf"):
        train("Stop", broken)
    with pytest.raises(RollBack, match="the loss of step 5 is inf"):
        train("Rollback", broken)
    run = train("Rollback", [0.5] * 10)
    assert (run.rollbacks, run.skipped_steps) == (1, {4, 5})
    lines = (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()
    resumed = [event["step"] for line in lines if (event := json.loads(line))["event"] == "resumed"]
    assert resumed == [4, 2], "that of step 4 may hold what made the loss of step 5"


def test_a_loop_of_ones_own_skips_what_it_was_rolled_back_from(attach: Any, tmp_path: Path) -> None:
    def train() -> Run:
        model, optimizer = model_and_optimizer()
        run = attach(model, optimizer, environ={"DDPJOB_NON_FINITE_LOSS": "Rollback"})
        for number in range(run.resume() + 1, 11):
            if number in run.skipped_steps:
                run.skip_step()
                continue
            step(model, optimizer)
            run.step_end(float("inf") if number == 5 else 0.5)
        run.finish()
        return run

    with pytest.raises(RollBack, match="skips steps 4 and 5"):
        train()
    assert train().step == 10
    lines = (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()
    assert [event["step"] for line in lines if (event := json.loads(line))["event"] == "step_skipped"] == [4, 5]


def test_without_an_operator_a_job_is_rolled_back_from_at_most_three_steps_too(attach: Any) -> None:
    """Each attempt has a creation time of its own there, and all have the same uid."""

    def train(created: int) -> None:
        model, optimizer = model_and_optimizer()
        as_without = {"DDPJOB_UID": "", "DDPJOB_ATTEMPT": "", "DDPJOB_CREATED": str(created)}
        run = attach(model, optimizer, environ={"DDPJOB_NON_FINITE_LOSS": "Rollback", **as_without})
        for number in range(run.resume() + 1, 21):
            if number in run.skipped_steps:
                run.skip_step()
                continue
            step(model, optimizer)
            run.step_end(float("nan") if number % 4 == 1 else 0.5)

    for created, skipped in enumerate(("step 1", "steps 4 and 5", "steps 8 and 9"), 1):
        with pytest.raises(RollBack, match=rf"skips {skipped} \(rollback {created} of 3\)"):
            train(created)
    with pytest.raises(LossNotFinite, match="the loss of step 13 is nan, after 3 rollbacks"):
        train(4)


def test_an_attempt_that_cannot_read_what_it_was_rolled_back_from_does_not_begin(
    attach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollback = {"environ": {"DDPJOB_NON_FINITE_LOSS": "Rollback"}}
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, **rollback)
    run.resume()
    step(model, optimizer)
    run.step_end(float("nan"))
    with pytest.raises(RollBack):
        run.record_loss()
    (asked,) = (tmp_path / "shared/checkpoints/job/rollbacks").iterdir()
    with monkeypatch.context() as patched:
        is_unreadable(patched, asked.with_name(f"{asked.name}.done"))
        with pytest.raises(SnapshotError, match="what this job was rolled back from cannot be read"):
            attach(*model_and_optimizer(), **rollback).resume()
    run = attach(*model_and_optimizer(), **rollback)
    run.resume()
    assert run.skipped_steps == {1}


def test_checkpoints_of_ones_own_are_rolled_back_too(attach: Any) -> None:
    rollback = {"environ": {"DDPJOB_NON_FINITE_LOSS": "Rollback"}}
    run = attach(**rollback)
    assert run.resume() == 0

    def train() -> None:
        for number in range(1, 9):
            run.step_end(float("nan") if number == 5 else 0.5)
            if run.should_save():
                with run.checkpoint() as folder:
                    (folder / "weights").write_text(str(number))

    with pytest.raises(RollBack):
        train()
    assert attach(**rollback).resume() == 2


def test_a_checkpoint_says_whether_its_loss_was_finite(attach: Any) -> None:
    run = attach(config={"lr": 0.1})
    run.resume()
    run.step_end(float("nan"))
    with run.checkpoint() as folder:
        (folder / "weights").write_text("")
    manifest = Manifest.read(run.latest())
    assert (manifest.loss_is_finite, manifest.config) == (False, {"lr": 0.1})


@pytest.mark.parametrize(("trained", "value", "finite"), [(True, "nan", False), (False, "-inf", True)])
def test_only_parameters_that_are_trained_have_to_be_finite(trained: bool, value: str, finite: bool) -> None:
    """One that is not may hold the mask of an attention."""
    model, _ = model_and_optimizer()
    mask = torch.full((3, 3), float(value))
    model.register_parameter("mask", torch.nn.Parameter(mask, requires_grad=trained))
    assert are_finite([model]) is finite
