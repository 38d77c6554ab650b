"""What a step computes: the same whatever the strategy, the number of ranks and the micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer.client.batches import mixed_seed
from ddp_trainer.tasks import load_task

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["ddp", "accumulated", "manual-allreduce", "manual-rs-ag"])
def test_two_ranks_have_the_losses_of_one(run, difference, name: str) -> None:
    assert difference(run(2, name).losses(), run(0, "digits").losses()) < 1e-5


@pytest.mark.parametrize("name", ["fsdp", "pipeline-1f1b", "pipeline-gpipe"])
def test_a_model_in_parts_has_the_losses_of_the_whole(run, difference, name: str) -> None:
    assert difference(run(2, name).losses(), run(0, "tiny").losses()) < 1e-4
    ours, reference = run(2, name).events("finished")[0], run(0, "tiny").events("finished")[0]
    assert ours["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)
    assert ours["eval_accuracy"] == pytest.approx(reference["eval_accuracy"], abs=2e-3)


def test_a_rank_without_a_share_of_the_last_batch_takes_part_and_adds_nothing(run, difference) -> None:
    assert difference(run(3, "seven").losses(), run(0, "seven").losses()) < 1e-5


@pytest.mark.parametrize("name", ["unused-allreduce", "unused-rs-ag"])
def test_a_parameter_that_no_rank_uses_is_not_changed_by_weight_decay(run, name: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    tensors = run(2, name).newest_tensors()
    torch.manual_seed(mixed_seed(0))
    initial = load_task("seeded_tasks:HalfUsed").model().state_dict()
    assert torch.equal(tensors["model/unused.weight"], initial["unused.weight"])
    assert not torch.equal(tensors["model/sometimes.weight"], initial["sometimes.weight"])


def test_validation_counts_every_sample_once(run) -> None:
    (validated,) = run(2, "seven").events("validated")
    # the squares of 0..6 over 7, and 0, 2, 4, 6 of 7 are even
    assert validated["eval_loss"] == pytest.approx(91 / 7, rel=1e-5)
    assert validated["eval_accuracy"] == 4 / 7


def test_digits_are_learnt_to_a_held_out_accuracy_of_95_percent(run) -> None:
    (finished,) = run(2, "learnt").events("finished")
    assert finished["eval_accuracy"] >= 0.95
    assert finished["samples"] == 6 * 1437


def test_a_sequential_model_is_cut_into_pipeline_stages_by_itself(run) -> None:
    assert run(2, "pipeline-digits").events("finished")[0]["eval_accuracy"] > 0.8


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_run_calls_what_torch_has_deprecated(run, ranks: int) -> None:
    lines = (run(ranks, "seven").root / "errors.txt").read_text().splitlines()
    assert not [line for line in lines if "Warning" in line and "deprecated" in line]
