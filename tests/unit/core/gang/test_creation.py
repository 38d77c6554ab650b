"""The backoff of creation."""

from __future__ import annotations

import pytest
from builders import NOW, later

from ddpjob_operator.core.gang.creation import FORGOTTEN_SECONDS, counted
from ddpjob_operator.core.values.observed import Creations


@pytest.mark.parametrize(
    ("known", "counts"),
    [
        pytest.param(None, 1, id="the first"),
        pytest.param(Creations(8, later(-FORGOTTEN_SECONDS)), 9, id="one of a pod that has vanished again and again"),
        pytest.param(Creations(8, later(-FORGOTTEN_SECONDS - 1)), 1, id="one in the place of a pod that was there"),
        pytest.param(Creations(8, later(60)), 9, id="one before the last, by a clock that was set back"),
    ],
)
def test_a_creation_counts_with_those_shortly_before_it(known: Creations | None, counts: int) -> None:
    assert counted(known, NOW) == Creations(counts, NOW)
