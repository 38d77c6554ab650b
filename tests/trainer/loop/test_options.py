"""Options that compose with the step: precision, compilation, normalisation, profiles."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.trainer

WIDTH = ("--task-options", "width=8")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_like_fp32(volume, precision: str) -> None:
    volume.trained(2, *WIDTH, "--precision", precision, "--max-steps", "60", "--lr", "0.003", "--clip-norm", "1")
    losses = volume.losses()
    assert losses[1] == pytest.approx(2.3, abs=0.1)
    assert losses[60] < 1.0


def test_fp16_skips_steps_that_overflow_and_resumes_with_its_scale(volume, trained_once) -> None:
    fp16 = ("--task", "seeded_tasks:Overflowing", "--precision", "fp16")
    reference = trained_once(2, *fp16, "--max-steps", "20")
    volume.trained(2, *fp16, "--max-steps", "10")
    volume.trained(2, *fp16, "--max-steps", "20", DDPJOB_ATTEMPT="1")
    assert volume.losses() == reference.losses()
    tensors, others = volume.newest_tensors(), reference.newest_tensors()
    assert [name for name in others if not torch.equal(tensors[name], others[name])] == []
    precision = json.loads((volume.newest / "state.json").read_text())["states"]["precision"]
    assert '"skipped_steps": 3' in json.dumps(precision), precision


def test_batch_statistics_are_resumed_to_the_same_bits(volume, trained_once) -> None:
    normalised = ("--task", "seeded_tasks:Normalised", "--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.05")
    reference = trained_once(2, *normalised, "--max-steps", "20")
    volume.trained(2, *normalised, "--max-steps", "9")
    volume.trained(2, *normalised, "--max-steps", "20", DDPJOB_ATTEMPT="1")
    assert volume.losses() == reference.losses()
    tensors, others = volume.newest_tensors(), reference.newest_tensors()
    assert any("running_mean" in name for name in others)
    assert [name for name in others if not torch.equal(tensors[name], others[name])] == []


def test_a_profile_holds_the_steps_of_its_window_for_every_rank(volume) -> None:
    volume.trained(2, *WIDTH, "--max-steps", "8", "--profile", "4:6")
    traces = sorted((volume.logs / "profile").iterdir())
    assert [trace.name.split(".")[0] for trace in traces] == ["rank-0", "rank-1"]
    for trace in traces:
        names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
        assert names.count("Optimizer.step#AdamW.step") == 3
        assert "aten::conv2d" in names


@pytest.mark.timeout(600)
def test_a_compiled_model_has_the_losses_of_the_plain_one(volume, trained_once, difference) -> None:
    linear = ("--task", "toy_linear", "--max-steps", "10")
    volume.trained(2, *linear, "--compile")
    assert difference(volume.losses(), trained_once(2, *linear).losses()) < 1e-5
