"""States that are not the same on all ranks, of which a snapshot would hold rank 0's, are named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from tests.trainer.train.volume import Volume

from ddp_trainer.client.alike import AFTER_STEPS, MOST, sampled, unlike


def trained(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    weight.grad = torch.arange(1.0, 7.0).reshape(2, 3)
    optimizer.step()
    return optimizer


def test_two_values_of_each_tensor_are_looked_at_and_no_counter() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = trained(torch.optim.Adam([weight], betas=(0.5, 0.5)), weight)
    found = sampled({"optimizer": optimizer})
    assert {name: list(values) for name, values in found.items()} == {
        "optimizer/0/exp_avg": [0.5, 2.5],  # halves of the gradients at (0, 0) and (1, 1)
        "optimizer/0/exp_avg_sq": [0.5, 12.5],
    }


def test_an_optimizer_without_a_state_has_nothing_to_look_at() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = trained(torch.optim.SGD([weight], lr=0.1), weight)
    assert not sampled({"optimizer": optimizer})
    assert not optimizer.state.get(weight)


def test_of_many_tensors_some_are_looked_at() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(MOST)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones(2, 3)
    optimizer.step()
    names = list(sampled({"optimizer": optimizer}))
    assert len(names) == MOST
    assert names[0].startswith("optimizer/0/")
    assert names[-1].startswith(f"optimizer/{MOST - 1}/")


@pytest.mark.parametrize(
    ("first", "second", "is_alike"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.001], True),
        ([0.0, 1e-35], [0.0, 0.0], True),
        ([math.nan, 1.0], [2.0, 1.0], True),
        ([1.0, 2.0], [1.0, -2.0], False),
        ([1.0, 2.0], [1.0, 0.5], False),
        ([1.0, 2.0], None, False),
    ],
)
def test_values_that_differ_by_more_than_rounding_are_named(
    first: list[float], second: list[float] | None, is_alike: bool
) -> None:
    same = {"optimizer/0/exp_avg": [3.0, 4.0]}
    others = same if second is None else {**same, "optimizer/1/exp_avg": second}
    of_ranks = [{**same, "optimizer/1/exp_avg": first}, others]
    assert unlike(of_ranks) == (None if is_alike else "optimizer/1/exp_avg")
    assert unlike([*reversed(of_ranks)]) == (None if is_alike else "optimizer/1/exp_avg")


def test_nothing_is_alike() -> None:
    assert unlike([{}, {}]) is None


def test_the_last_step_of_a_run_is_none_of_those_whose_states_are_compared(
    attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may end after it, and the others would wait for it."""
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, total_steps=AFTER_STEPS)
    compared: list[int] = []
    monkeypatch.setattr(run, "_compared", {"optimizer": optimizer})
    monkeypatch.setattr(run, "_compare", lambda: compared.append(run.step))
    run.resume()
    for _ in range(AFTER_STEPS):
        run.step_end(step(model, optimizer))
    assert compared == list(range(1, AFTER_STEPS))


@pytest.mark.parametrize("divides", ["yes", "no"])
def test_an_optimizer_that_divides_its_state_among_the_ranks_is_named(job: Volume, divides: str) -> None:
    job.trained(2, "own_divided.py", DIVIDES=divides)
    named = [(event["step"], event["state"]) for event in job.events("states_differ")]
    assert named == ([(2, "optimizer/0/momentum")] if divides == "yes" else [])
