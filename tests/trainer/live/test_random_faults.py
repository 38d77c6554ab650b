"""What `random_faults` finds in the histories of ranks."""

from __future__ import annotations

import pytest
from tests.trainer.live.random_faults import Step, split_brain


def history(*weights: str, first: int = 1) -> list[Step]:
    return [Step(float(step), step, 2, digest) for step, digest in enumerate(weights, first)]


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
