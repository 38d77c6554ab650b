"""States of which each rank has its own: each gets its own back, and another number of ranks says what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.train.volume import Volume

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.per_rank import MOST_BYTES, PerRank, packed, unpacked
from ddp_trainer.snapshots.ranks import Ranks


def cursors(job: Volume) -> list[Any]:
    return [json.loads((job.root / "shared" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_gets_its_own_state_back_and_one_rank_alone_begins_anew_and_says_so(
    job: Volume, tmp_path: Path
) -> None:
    unbroken = Volume(tmp_path / "unbroken", here=job.here).trained(2, "own_loaders.py", STEPS="9")
    job.trained(2, "own_loaders.py", STEPS="5").trained(2, "own_loaders.py", STEPS="9", DDPJOB_ATTEMPT="1")
    assert cursors(job) == cursors(unbroken)
    assert [cursor["position"] for cursor in cursors(job)] == [9, 1009]
    assert job.losses() == unbroken.losses()
    job.trained(1, "own_loaders.py", STEPS="12", DDPJOB_ATTEMPT="2")
    assert cursors(job)[0]["position"] == 3
    messages = [event["message"] for event in job.events("snapshot_reseeded")]
    assert any("cursor is of 2 ranks, one each, and this is 1: each begins with the one" in text for text in messages)


class Holding:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_is_packed_comes_back_with_the_same_types_and_bits() -> None:
    state = {
        "numbers": (1, 2.5, None, True),
        "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        5: {"text"},
    }
    found = unpacked(packed(Holding(state)))
    assert (found["numbers"], found[5]) == (state["numbers"], state[5])
    for name in ("half", "scalar", "empty"):
        assert found[name].dtype == state[name].dtype  # type: ignore[index]
        assert torch.equal(found[name], state[name])  # type: ignore[index]


def test_a_state_that_is_too_large_to_gather_is_refused_by_name() -> None:
    state = PerRank("loader", Holding({"data": torch.zeros(MOST_BYTES)}), Ranks(0, 1))
    with pytest.raises(UserError, match=r"loader of rank 0 has [\d,]+ bytes; a state of each rank may have 4,194,304"):
        state.gather()
