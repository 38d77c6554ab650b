"""The figures of each epoch, and the order of its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.logs.__main__ import main
from ddp_trainer.logs.losses import EVENTS, read_epochs, read_losses
from ddp_trainer.train.data import Cursor

FLAGS = ("--task=seeded_tasks:Unstable", "--task-options=step=0", "--global-batch=16", "--epochs=3")


def test_each_epoch_has_its_mean_loss_and_its_validation_also_where_an_attempt_began_in_it(train_here, capfd) -> None:
    # four steps an epoch; the second attempt begins in the middle of the second
    every = {"DDPJOB_SNAPSHOT_EVERY": "3steps"}
    flags = (*FLAGS, "--task-options=validates=true")
    train_here(*flags, "--max-steps=6", **every)
    volume = train_here(*flags, **every)
    losses = volume.losses()
    rates = {line["step"]: line.get("samplesPerSecond") for line in read_losses(volume.logs)}
    # two steps of an attempt measure it, also if they are in epochs apart
    assert [step for step, rate in rates.items() if rate is None] == [1, 7], rates
    assert all(rate > 0 for rate in rates.values() if rate is not None)
    capfd.readouterr()
    assert main(["--epochs", str(volume.logs)]) == 0
    figures = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["epoch"] for line in figures] == [0, 1, 2]
    validated = {event["step"]: event["eval_loss"] for event in volume.events("validated")}
    for line in figures:
        own = [losses[4 * line["epoch"] + step] for step in (1, 2, 3, 4)]
        assert line["epoch_loss"] == pytest.approx(sum(own) / 4, rel=1e-12)
        assert line["eval_loss"] == validated[line["step"]]
    assert volume.beats()[0]["metrics"]["epoch_loss"] == figures[-1]["epoch_loss"]


def test_epochs_of_an_earlier_run_of_the_name_and_those_to_be_trained_again_are_left_out(tmp_path: Path) -> None:
    events = [{"event": "started", "step": 0}]
    events += [{"event": "epoch", "epoch": epoch, "step": 4 * epoch + 4, "epoch_loss": 1.0} for epoch in range(3)]
    events += [{"event": "resumed", "step": 9}]
    (tmp_path / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert [figures["step"] for figures in read_epochs(tmp_path)] == [4, 8]
    events += [{"event": "started", "step": 0}, {"event": "epoch", "epoch": 0, "step": 2, "epoch_loss": 0.5}]
    (tmp_path / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert read_epochs(tmp_path) == [{"epoch": 0, "step": 2, "epoch_loss": 0.5}]


def test_without_shuffling_the_samples_come_in_their_order() -> None:
    plan = BatchPlan(samples=10, global_batch=4, shuffle=False)
    assert torch.cat(list(plan.batches(3))).tolist() == list(range(10))
    with pytest.raises(UserError, match="had --shuffle True, this one has False"):
        Cursor(plan).load_state_dict(Cursor(BatchPlan(samples=10, global_batch=4)).state_dict())
