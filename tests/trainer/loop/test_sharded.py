"""Strategies in which no rank holds the whole model."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.trainer

SMALL = ("--task", "tiny_lm", "--global-batch", "8", "--clip-norm", "1", "--lr", "0.001")
SHAPE = tuple(
    part
    for option in ("d_model=64", "n_layers=2", "d_ff=128", "samples=80", "dropout=0.1")
    for part in ("--task-options", option)
)
EXACT = (*SMALL, *SHAPE, "--task-options", "dropout=0")


def test_fsdp_has_the_losses_of_one_rank(volume, trained_once, difference) -> None:
    single = trained_once(0, "--strategy", "single", *EXACT, "--max-steps", "12")
    volume.trained(2, "--strategy", "fsdp", *EXACT, "--max-steps", "12", "--micro-batch", "2")
    assert difference(volume.losses(), single.losses()) < 1e-4
    ours, reference = volume.events("finished")[0], single.events("finished")[0]
    assert ours["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)
    assert ours["eval_accuracy"] == pytest.approx(reference["eval_accuracy"], abs=2e-3)


def test_fsdp_resumes_to_the_same_losses_and_at_another_number_of_ranks(volume, trained_once, difference) -> None:
    fsdp = ("--strategy", "fsdp", *SMALL, *SHAPE)
    reference = trained_once(2, *fsdp, "--max-steps", "12")
    volume.trained(2, *fsdp, "--max-steps", "5")
    volume.trained(2, *fsdp, "--max-steps", "12", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [5]
    assert volume.losses() == reference.losses()
    volume.trained(1, *fsdp, "--max-steps", "14", DDPJOB_ATTEMPT="2")
    assert sorted(volume.losses()) == list(range(1, 15))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_of_two_stages_has_the_losses_of_one_rank(volume, trained_once, difference, schedule: str) -> None:
    # 80 sequences in batches of 12: the last batch of an epoch is 8
    steps = ("--max-steps", "12", "--global-batch", "12")
    single = trained_once(0, "--strategy", "single", *EXACT, *steps)
    volume.trained(2, "--strategy", "pipeline", "--pipeline-schedule", schedule, *EXACT, *steps)
    assert difference(volume.losses(), single.losses()) < 1e-4
    ours, reference = volume.events("finished")[0], single.events("finished")[0]
    assert ours["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)


def test_a_pipeline_resumes_each_stage_to_the_same_losses(volume, trained_once) -> None:
    pipeline = ("--strategy", "pipeline", *SMALL, *SHAPE)
    volume.trained(2, *pipeline, "--max-steps", "5")
    volume.trained(2, *pipeline, "--max-steps", "12", DDPJOB_ATTEMPT="1")
    assert [event["step"] for event in volume.events("resumed")] == [5]
    assert volume.losses() == trained_once(2, *pipeline, "--max-steps", "12").losses()


def test_a_sequential_model_is_cut_into_stages_by_itself(volume) -> None:
    volume.trained(2, "--task", "digits", "--strategy", "pipeline", "--max-steps", "60", "--lr", "0.003")
    assert volume.events("finished")[0]["eval_accuracy"] > 0.8
