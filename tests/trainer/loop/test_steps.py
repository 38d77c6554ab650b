"""What a step computes: the same whatever the number of ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer.randomness import mixed_seed
from ddp_trainer.tasks import load_task

HERE = Path(__file__).parent
pytestmark = pytest.mark.trainer

# 1,437 samples in batches of 64: the last batch of an epoch has 29, which two ranks cannot share evenly.
DIGITS = ("--task-options", "dropout=0", "--task-options", "width=8", "--max-steps", "50", "--clip-norm", "1")
SINGLE = ("--strategy", "single", *DIGITS)


def test_two_ranks_of_ddp_have_the_losses_of_one(trained_once, difference) -> None:
    assert difference(trained_once(2, *DIGITS).losses(), trained_once(0, *SINGLE).losses()) < 1e-5


@pytest.mark.parametrize("strategy", ["manual_allreduce", "manual_rs_ag"])
def test_gradients_reduced_by_hand_have_the_losses_of_one_rank(volume, trained_once, difference, strategy: str) -> None:
    volume.trained(2, *DIGITS, "--strategy", strategy, "--micro-batch", "16")
    assert difference(volume.losses(), trained_once(0, *SINGLE).losses()) < 1e-5


@pytest.mark.parametrize("strategy", ["manual_allreduce", "manual_rs_ag"])
def test_a_parameter_that_no_rank_uses_is_not_changed_by_weight_decay(volume, strategy: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    decay = ("--weight-decay", "0.5", "--max-steps", "3")
    volume.trained(2, "--task", "seeded_tasks:HalfUsed", "--strategy", strategy, *decay)
    tensors = volume.newest_tensors()
    torch.manual_seed(mixed_seed(0))
    initial = load_task("seeded_tasks:HalfUsed").model().state_dict()
    assert torch.equal(tensors["model/unused.weight"], initial["unused.weight"])
    assert not torch.equal(tensors["model/sometimes.weight"], initial["sometimes.weight"])


def test_accumulated_micro_batches_with_an_uneven_tail_have_the_losses_of_the_whole_batch(
    volume, trained_once, difference
) -> None:
    # A share of 32 in micro-batches of at most 12 is 11, 11 and 10.
    volume.trained(2, *DIGITS, "--micro-batch", "12")
    assert difference(volume.losses(), trained_once(0, *SINGLE).losses()) < 1e-5


def test_a_rank_without_a_share_of_the_last_batch_takes_part_and_adds_nothing(volume, trained_once, difference) -> None:
    # 7 samples in batches of 6: the last batch is one sample for three ranks.
    seven = ("--task", "seeded_tasks:Seven", "--global-batch", "6", "--epochs", "4", "--lr", "0.01")
    volume.trained(3, *seven)
    assert difference(volume.losses(), trained_once(0, "--strategy", "single", *seven).losses()) < 1e-5


def test_validation_counts_every_sample_once(volume) -> None:
    volume.trained(2, "--task", "seeded_tasks:Seven", "--global-batch", "4", "--max-steps", "1", "--lr", "1e-9")
    (validated,) = volume.events("validated")
    # the squares of 0..6 over 7, and 0, 2, 4, 6 of 7 are even
    assert validated["eval_loss"] == pytest.approx(91 / 7, rel=1e-5)
    assert validated["eval_accuracy"] == 4 / 7


def test_digits_are_learnt_to_a_held_out_accuracy_of_95_percent(volume) -> None:
    volume.trained(2, "--task", "digits", "--epochs", "12")
    (finished,) = volume.events("finished")
    assert finished["eval_accuracy"] >= 0.95
    assert finished["samples"] == 12 * 1437
