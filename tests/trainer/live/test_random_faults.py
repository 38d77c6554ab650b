"""What `random_faults` finds in the histories of ranks."""

from __future__ import annotations

import pytest
from tests.trainer.live.random_faults import History, Step, split_brain, wrong_steps


def history(*weights: str, first: int = 1) -> list[Step]:
    return [Step(0, step, digest) for step, digest in enumerate(weights, first)]


@pytest.mark.parametrize(
    ("histories", "wrong"),
    [
        ([history("a", "b", "c"), history("a", "b", "c")], 0),
        ([history("a", "b", "c"), history("a", "x")], 0),  # lost with a step that the others have made again
        ([history("a", "b", "c"), history("b", "c", first=2)], 0),  # joined
        ([history("a", "b", "c"), history("a", "x", "y")], 1),  # two halves went on
    ],
)
def test_two_states_from_which_ranks_went_on_are_a_split_brain(histories: list[list[Step]], wrong: int) -> None:
    assert len(split_brain(histories)) == wrong


UNBROKEN = [History(history("a", "b"), [(0, 1, [0, 1, 2, 3]), (0, 2, [4, 5, 6, 7])])]


def two_ranks(*second: tuple[int, int, list[int]], lr: float = 0.001) -> list[History]:
    """The first takes its half of both steps; the second does these parts."""
    first = [(0, 1, [0, 1]), (0, 2, [4, 5])]
    return [History([Step(0, 1, "a"), Step(0, 2, "b", lr)], first), History([], list(second))]


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (two_ranks((0, 1, [2, 3]), (0, 2, [6]), (0, 2, [7])), 0),
        ([*two_ranks((0, 1, [2, 3]), (0, 2, [6, 7])), History([], [(1, 2, [4, 5])])], 0),  # a step that was dropped
        (two_ranks((0, 1, [2, 3]), (0, 2, [6])), 1),  # a sample is missing
        (two_ranks((0, 1, [2, 3]), (0, 2, [5, 6, 7])), 1),  # one counted twice
        (two_ranks((0, 1, [2, 3]), (0, 2, [6, 7]), lr=0.002), 1),
        ([History(history("a"), [(0, 1, [0, 1, 2, 3])])], 1),  # a step is missing
    ],
)
def test_each_step_is_on_its_samples_once_with_its_learning_rate(found: list[History], wrong: int) -> None:
    assert len(list(wrong_steps(found, UNBROKEN))) == wrong
