"""The update rule and the course of the learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.optim import build_optimizer, build_scheduler
from ddp_trainer.train.precision import Precision

CPU = torch.device("cpu")


def optimizer(**settings: Any) -> torch.optim.Optimizer:
    return build_optimizer(TrainConfig(**settings), torch.nn.Linear(2, 1).parameters(), CPU)


def rates(steps: int, **settings: Any) -> list[float]:
    """The learning rate of each step."""
    config = TrainConfig(lr=1.0, **settings)
    rule = optimizer(lr=1.0)
    scheduler = build_scheduler(config, rule, steps)
    found = []
    for _ in range(steps):
        found.append(rule.param_groups[0]["lr"])
        rule.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"scheduler": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"scheduler": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.5]),
        ({"scheduler": "cosine"}, [1, 0.853553, 0.5, 0.146447]),
        ({"scheduler": "step", "decay_every": 2, "decay_factor": 0.1}, [1, 1, 0.1, 0.1]),
        ({"scheduler": "step", "decay_every": 1, "warmup_steps": 1, "decay_factor": 0.5}, [1, 1, 0.5, 0.25]),
    ],
)
def test_the_learning_rate_rises_in_a_line_and_falls_as_told(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **settings) == pytest.approx(expected, abs=1e-6)


def test_the_rate_that_is_plotted_for_a_step_is_the_one_that_it_was_taken_with(train_here) -> None:
    warming = ("--warmup-steps=8", "--lr=0.8", "--max-steps=9", "--log-every=1", "--global-batch=16")
    volume = train_here("--task=seeded_tasks:Unstable", "--task-options=step=0", *warming)
    shown = EventAccumulator(str(volume.logs / "tensorboard")).Reload()
    points = {point.step: point.value for point in shown.Scalars("train/learning_rate")}
    assert points == pytest.approx({step: 0.1 * min(step, 8) for step in range(1, 10)})
    (beat,) = volume.beats()
    assert (beat["step"], beat["learningRate"]) == (9, 0.8)


@pytest.mark.parametrize(("scheduler", "steps", "rate"), [("linear", 8, 0.5), ("linear", 4, 0.0), ("none", 8, 1.0)])
def test_a_run_that_resumes_with_another_decay_has_the_rate_of_that_one_at_once(
    scheduler: str, steps: int, rate: float
) -> None:
    ended, going_on = optimizer(lr=1.0), optimizer(lr=1.0)
    before = build_scheduler(TrainConfig(lr=1.0, scheduler="linear"), ended, 4)
    for _ in range(4):
        ended.step()
        before.step()
    after = build_scheduler(TrainConfig(lr=1.0, scheduler=scheduler), going_on, steps)
    going_on.load_state_dict(ended.state_dict())
    after.load_state_dict(before.state_dict())
    assert going_on.param_groups[0]["lr"] == after.get_last_lr()[0] == rate


def test_a_run_that_resumes_with_other_settings_of_the_scaler_goes_on_with_these() -> None:
    state = Precision("fp16", CPU, {"growth_interval": 2000}).state_dict()
    state["scaler"] |= {"scale": 1024.0, "_growth_tracker": 1500}
    after = Precision("fp16", CPU, {"init_scale": 8.0, "growth_factor": 4.0, "growth_interval": 500})
    after.load_state_dict(state)
    assert after.state_dict()["scaler"] == {
        "scale": 1024.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 500,
        "_growth_tracker": 499,  # with 500 or more, torch would never let the scale grow
    }


@pytest.mark.parametrize(
    ("settings", "kind", "group"),
    [
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ({"optimizer": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_each_optimizer_is_torchs_with_its_settings(
    settings: dict[str, Any], kind: type[torch.optim.Optimizer], group: dict[str, float]
) -> None:
    built = optimizer(lr=0.5, **settings)
    assert type(built) is kind
    assert built.param_groups[0].items() >= {"lr": 0.5, **group}.items()
    assert not built.param_groups[0]["fused"], "fused kernels are for CUDA"


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(UserError, match="the model has no parameter that requires a gradient"):
        build_optimizer(TrainConfig(), [], CPU)


def test_a_warm_up_that_outlasts_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="--warmup-steps 9 leaves nothing of the 9 steps of this run"):
        build_scheduler(TrainConfig(warmup_steps=9), optimizer(), 9)
