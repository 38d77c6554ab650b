"""What becomes of a rank between two groups. A step that is dropped leaves no trace: its batch, loaded again, and its
forward pass draw the same numbers.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_trainer.client.recovery import Recovery
from ddp_trainer.contract.exit_codes import Left
from ddp_trainer.contract.outcomes import classify
from ddp_trainer.live.deciding import Excluded
from ddp_trainer.logs.losses import LossLog
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.train.data import DataSetLost, fetch
from ddp_trainer.train.loop import TrainingLoop


def drawn() -> tuple[float, float, float]:
    """By a data set that draws from all three."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


class Counter:
    """A state of a program's own."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def of(**parts: Any) -> Recovery:
    """A recovery of nothing else."""
    others = ("membership", "place", "world", "attached", "regroup", "log", "heartbeat", "states", "modules")
    return Recovery(**{**dict.fromkeys(others), "position": SimpleNamespace(steps=7), **parts})


@pytest.mark.parametrize("boundary", [True, False], ids=["after a step", "first of a group"])
def test_a_step_that_is_taken_again_draws_the_same_numbers(boundary: bool) -> None:
    model = nn.BatchNorm1d(2)
    generators: Tensor | None = rng.capture() if boundary else None
    recovery = of(modules=lambda: (model,))
    recovery.begin_step(generators)
    first = drawn()
    model(torch.ones(3, 2))
    recovery._drop_unfinished_step()
    assert drawn() == first
    assert (float(model.running_mean[0]), int(model.num_batches_tracked)) == (0.0, 0)  # type: ignore[index]


def test_a_buffer_that_a_step_replaces_makes_or_takes_away_is_put_back() -> None:
    model = nn.Sequential(nn.Module())
    part = model[0]
    for name, value in {
        "replaced": torch.zeros(2),
        "grown": torch.zeros(1),
        "made": None,
        "taken": torch.ones(1),
    }.items():
        part.register_buffer(name, value)
    recovery = of(modules=lambda: (model,))
    recovery.begin_step()
    for _ in range(2):
        part.replaced = part.replaced + 1
        part.grown, part.made, part.taken = torch.ones(3), torch.ones(1), None
        recovery._drop_unfinished_step()
        assert part.made is None
        assert [part.replaced.tolist(), part.grown.tolist(), part.taken.tolist()] == [[0, 0], [0], [1]]


def test_a_state_of_the_programs_own_is_put_back_however_often_the_step_is_taken() -> None:
    counter = Counter()
    counter.seen.append(6)
    recovery = of(modules=tuple, changing={"counter": counter})
    recovery.begin_step()
    for _ in range(2):
        counter.seen.append(7)
        recovery._drop_unfinished_step()
        assert counter.seen == [6]


@pytest.mark.parametrize(("is_asked_to_stop", "end"), [(True, Left), (False, Excluded)])
def test_a_rank_that_the_others_leave_out_has_left_where_it_was_asked_to_stop(
    is_asked_to_stop: bool, end: type[BaseException]
) -> None:
    """It may hear of that one step after the other ranks of its pod, which are gone by then."""
    membership, attached = Mock(), Mock(is_asked_to_stop=is_asked_to_stop)
    membership.next_view.side_effect = Excluded("another rank of this pod is lost")
    with pytest.raises(end):
        of(membership=membership, attached=attached).go_on()
    membership.depart.assert_called_once_with()  # no other rank waits for it


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (None, [(7, 0.1)], 0.1),
        ((6, 0.3), [(7, 0.1)], 0.1),
        ((7, 0.1), [(6, 0.3)], 0.1),
        ((7, 0.1), [None], 0.1),
        (None, [None], None),
    ],
    ids=["a new rank", "behind", "ahead", "another is new", "nobody knows one"],
)
def test_all_ranks_of_a_group_have_the_same_last_loss(
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[int, float] | None,
    others: list[tuple[int, float] | None],
    expected: float | None,
) -> None:
    """A script may decide by it: a rank that knows none, or that before, would take another way."""
    losses = LossLog(None, 0)
    if own is not None:
        losses.append(step=own[0], epoch=0, loss=own[1])

    def all_reduce(rows: Tensor, async_op: bool) -> Mock:
        for rank, known in enumerate(others, 1):
            if rows.dtype is torch.int64:
                rows[rank] = torch.tensor([7, 0])  # finished steps, and whether one was begun
            elif known is not None:
                rows[rank] = torch.tensor([1, *known], dtype=torch.float64)
        return Mock()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    size = 1 + len(others)
    recovery = of(
        log=SimpleNamespace(losses=losses),
        world=World(rank=0, size=size, local_rank=0),
        membership=Mock(rank=0, size=size),
        attached=Mock(),
        regroup=Mock(),
    )
    recovery._has_state = True
    recovery._meet()
    assert losses.last_loss == expected


class Remote:
    """Samples in a storage that does not answer."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(f"cannot read sample {index}: [Errno 104] Connection reset by peer")


def test_a_connection_that_the_data_set_has_lost_is_no_lost_rank() -> None:
    """All ranks took the same step again and again, without an end."""
    loop = Mock(step=0, total_steps=1)
    loop._train_epoch.side_effect = lambda: fetch(Remote(), torch.tensor([7]))  # type: ignore[arg-type]
    with pytest.raises(DataSetLost, match=r"\(cannot read sample 7: .*Connection reset by peer\)$") as raised:
        TrainingLoop._is_at_end(loop)
    assert classify(raised.value)[1] == "WorkerException"
    assert raised.traceback[-1].name == "__getitem__"  # what there is to correct
    loop.recovery.lost.assert_not_called()


def test_a_connection_that_a_collective_has_lost_is_a_lost_rank() -> None:
    loop = Mock(step=0, total_steps=1)
    loop._train_epoch.side_effect = error = RuntimeError("Connection closed by peer [10.0.0.2]:4711")
    assert not TrainingLoop._is_at_end(loop)
    loop.recovery.lost.assert_called_once_with(error)
