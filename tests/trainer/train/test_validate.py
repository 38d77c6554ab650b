"""Validation in 16 bits: what is added up is as exact as the sum."""

from __future__ import annotations

import importlib
import random
import re

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.train.volume import HERE
from torch.nn import functional as F

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.__main__ import main as snapshots
from ddp_trainer.tasks import load_task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies.base import Single
from ddp_trainer.train.validate import evaluate


def test_the_losses_of_a_validation_in_bf16_are_not_rounded_to_bf16() -> None:
    task, world = load_task("digits", {"width": 8}), World()
    strategy = Single(TrainConfig(strategy="single", precision="bf16"), world, task, Precision("bf16", world.device))
    strategy.wrap(task.model())
    dataset = task.eval_dataset()
    assert dataset is not None
    found = evaluate(strategy, dataset, world, batch=len(dataset), on_batch=lambda: None)  # type: ignore[arg-type]
    images, labels = (torch.stack(list(part)) for part in zip(*dataset, strict=True))
    strategy.model.eval()
    with torch.no_grad():
        wanted = F.cross_entropy(strategy.predict((images, labels)).float(), labels)
    assert found.loss == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["normalised-unbroken", "fsdp-normalised"])
def test_a_validation_is_of_the_running_statistics_that_the_snapshot_holds(run, tmp_path, monkeypatch, name) -> None:
    trained = run(2, name)
    monkeypatch.syspath_prepend(HERE)
    assert snapshots(["export", str(trained.checkpoints), "--to", str(tmp_path)]) == 0
    task = load_task("seeded_tasks:Normalised")
    model = task.model().eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images, labels = task.eval_dataset()[:]  # type: ignore[index]
    with torch.no_grad():
        wanted = F.cross_entropy(model(images), labels).item()
    assert trained.events("finished")[0]["eval_loss"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("empty", "words"),
    [
        ("true", "its eval_dataset is empty: hold samples out, or return None for no validation"),
        ("false", "its eval_dataset has no len(), so the ranks cannot share it; give it __len__ and __getitem__"),
    ],
)
def test_a_held_out_set_that_cannot_be_validated_on_is_refused_before_training(train_here, empty, words) -> None:
    task = ("--task", "seeded_tasks:HeldOut", "--task-options", f"empty={empty}", "--global-batch", "7")
    with pytest.raises(UserError, match=re.escape(words)):
        train_here(*task)
    train_here(*task, "--validate-every", "never", "--max-steps", "1")


def test_each_start_of_a_job_holds_out_the_same_samples(train_here) -> None:
    for _ in range(2):
        torch.seed()
        random.seed()
        train_here("--task", "seeded_tasks:Drawn", "--global-batch", "7", "--epochs", "1")
    first, second = importlib.import_module("seeded_tasks").Drawn.seen
    assert first == second
