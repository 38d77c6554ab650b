"""What live recovery costs, counted once, and told to a rank that joins."""

from __future__ import annotations

import json

import pytest

from ddp_trainer.live.costs import Costs, is_step_dropped


@pytest.mark.parametrize(
    ("steps", "has_begun", "dropped"),
    [
        ([7, 7], [True, True], True),
        ([7, 7], [False, True], True),  # the first was still at the end of the step before
        ([7, 7], [False, False], False),  # lost in a validation
        ([7, 8], [True, False], False),  # the step of the first is that which the second has finished
        ([7, 8], [True, True], True),
        ([-1, 7, 7], [False, True, True], True),  # with a rank that joins
        ([-1, 7], [False, False], False),
    ],
)
def test_a_step_is_dropped_where_no_rank_has_finished_what_was_begun(
    steps: list[int], has_begun: list[bool], dropped: bool
) -> None:
    assert is_step_dropped(steps, has_begun) is dropped


def counts(costs: Costs) -> dict[str, int]:
    return {kind: sum(found["counts"]) for kind, found in costs.seconds.items()}


def test_each_recovery_counts_by_its_kind_and_a_dropped_step_once() -> None:
    before = Costs()
    after = before.after("lost", 0.2, has_dropped=True).after("joined", 0.12, has_dropped=False)
    assert counts(before) == {"lost": 0, "left": 0, "joined": 0}, "a value is not changed"
    assert counts(after) == {"lost": 1, "left": 0, "joined": 1}
    assert after.seconds["lost"]["sum"] == 0.2
    assert (after.dropped_steps, after.last) == (1, {"kind": "joined", "seconds": 0.12})


def test_a_rank_that_joins_goes_on_with_what_its_peers_have_counted() -> None:
    costs = Costs().after("lost", 0.2, has_dropped=True)
    told = Costs.from_json(json.loads(json.dumps(costs.to_json())))
    assert told == costs
    assert counts(told.after("lost", 40.0, has_dropped=False))["lost"] == 2
