"""Options that compose with the step: precision, compilation, normalisation, profiles."""

from __future__ import annotations

import json
from unittest.mock import ANY, Mock, call

import pytest
import torch

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.train import build
from ddp_trainer.train.config import StepWindow
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.profiling import Profiler


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_what_a_run_is_built_with_is_what_its_flags_say(
    train_here, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    determined, plan, precision = Mock(), Mock(wraps=BatchPlan), Mock(wraps=Precision)
    monkeypatch.setattr(build, "make_deterministic", determined)
    monkeypatch.setattr(build, "BatchPlan", plan)
    monkeypatch.setattr(build, "Precision", precision)
    flags = {
        "--global-batch": 48, "--seed": 7, "--last-batch": "drop", "--precision": "fp16", "--scaler-init-scale": 1024,
        "--scaler-growth-factor": 3, "--scaler-backoff-factor": 0.25, "--scaler-growth-interval": 9, "--max-steps": 1,
    }  # fmt: skip
    deterministic = "--deterministic" if is_deterministic else "--no-deterministic"
    train_here("--task=toy_linear", deterministic, "--no-shuffle", *(f"{flag}={flags[flag]}" for flag in flags))
    assert determined.mock_calls == [call(torch.device("cpu"))] * is_deterministic
    assert plan.mock_calls == [call(samples=ANY, global_batch=48, seed=7, keep_last=False, shuffle=False)]
    scaler = {"init_scale": 1024, "growth_factor": 3, "backoff_factor": 0.25, "growth_interval": 9}
    assert precision.mock_calls == [call("fp16", torch.device("cpu"), scaler)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_like_fp32(run, precision: str) -> None:
    losses = run(2, precision).losses()
    assert losses[1] == pytest.approx(2.3, abs=0.1)
    assert losses[60] < 1.0


def test_fp16_skips_and_counts_the_steps_that_overflow(run) -> None:
    volume = run(2, "fp16-unbroken")
    precision = json.loads((volume.newest / "state.json").read_text())["states"]["precision"]
    assert '"skipped_steps": 3' in json.dumps(precision), precision


def test_a_profile_holds_the_steps_of_its_window_for_every_rank(run) -> None:
    traces = sorted((run(2, "profiled").logs / "profile").iterdir())
    assert [trace.name.split(".")[0] for trace in traces] == ["rank-0", "rank-1"]
    for trace in traces:
        names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
        assert names.count("Optimizer.step#AdamW.step") == 3
        assert "aten::conv2d" in names


@pytest.mark.parametrize("name", ["compiled", "compiled-accumulated", "compiled-fsdp", "compiled-manual"])
def test_a_compiled_model_has_the_losses_of_the_plain_one(run, difference, name: str) -> None:
    assert difference(run(2, name).losses(), run(2, "linear").losses()) < 1e-5


@pytest.mark.parametrize("name", ["fsdp-bf16", "pipeline-bf16"])
def test_a_model_in_parts_learns_in_bf16_as_the_whole_does_in_fp32(run, difference, name: str) -> None:
    assert 0 < difference(run(2, name).losses(), run(0, "tiny").losses()) < 0.1


def test_a_step_that_is_taken_again_is_in_the_profile_that_records_it(tmp_path, monkeypatch) -> None:
    """With live recovery: torch refuses a second profile, so all ranks that are left would end."""
    made = Mock()
    monkeypatch.setattr(torch.profiler, "profile", made)
    profiler = Profiler(StepWindow(2, 3), tmp_path, World())
    for step in (1, 2, 2, 3):
        profiler.before_step(step)
    made.assert_called_once()
    made.return_value.start.assert_called_once_with()
    assert profiler.after_step(2) is None
    assert profiler.after_step(3) == tmp_path
    made.return_value.stop.assert_called_once_with()


def test_a_run_that_resumes_within_the_window_profiles_the_rest_of_it(tmp_path, monkeypatch) -> None:
    made = Mock()
    monkeypatch.setattr(torch.profiler, "profile", made)
    profiler = Profiler(StepWindow(2, 4), tmp_path, World())
    written = []
    for step in range(3, 8):
        profiler.before_step(step)
        written.append(profiler.after_step(step))
    made.assert_called_once()
    assert written == [None, tmp_path, None, None, None]


def test_a_profile_that_the_run_ends_before_is_refused_before_training(train_here) -> None:
    with pytest.raises(UserError, match="--profile 2:4 ends after the last of the 3 steps of this run"):
        train_here("--task=toy_linear", "--max-steps=3", "--profile=2:4")
