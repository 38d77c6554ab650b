"""What the ranks of a pod hold and decide together: here one rank is a pod. Several are in launch/test_live_hsdp.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_trainer.client.local_shards import LocalShards
from ddp_trainer.live.pod_group import PodGroup, ViewLost, all_of, any_of
from ddp_trainer.train.live import SHARDS_SINCE

LOST = "Connection closed by peer"


class Leaving:
    """How often the view was left."""

    times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def leave() -> Leaving:
    return Leaving()


@pytest.fixture
def pod(tmp_path: Path, leave: Leaving) -> Iterator[PodGroup]:
    if torch.__version__ < SHARDS_SINCE:
        pytest.skip(f"needs PyTorch {SHARDS_SINCE}, and this is {torch.__version__}")
    yield PodGroup(0, 1, tmp_path / "meeting", leave=leave, timeout_seconds=60.0)
    dist.distributed_c10d._unregister_all_process_groups()


@pytest.mark.parametrize(
    ("completed", "all_go_on", "one_is_enough"), [(0, False, False), (1, False, True), (2, True, True)]
)
def test_the_ranks_of_a_pod_go_on_together(completed: int, all_go_on: bool, one_is_enough: bool) -> None:
    assert (all_of(completed, 2), any_of(completed, 2)) == (all_go_on, one_is_enough)


def test_a_rank_that_loses_another_pod_leaves_before_it_waits_for_its_own(pod: PodGroup, leave: Leaving) -> None:
    with pytest.raises(ViewLost, match=LOST), pod.together():
        raise RuntimeError(LOST)
    assert leave.times == 1


def test_what_all_ranks_of_the_pod_know_is_not_agreed_on_again(pod: PodGroup, leave: Leaving) -> None:
    known = ViewLost(LOST)
    with pytest.raises(ViewLost) as raised, pod.together():
        raise known
    assert raised.value is known
    assert leave.times == 0


def test_an_error_of_a_rank_is_its_own(pod: PodGroup, leave: Leaving) -> None:
    with pytest.raises(RuntimeError, match="sizes of tensors"), pod.together():
        raise RuntimeError("the sizes of tensors must match")
    assert leave.times == 0


class Model(nn.Module):
    """With a buffer, and a part that is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 5)
        self.register_buffer("count", torch.tensor(float(seed)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def sharded(pod: PodGroup, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(seed)
    fully_shard(model, mesh=pod.mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + seed))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in model.state_dict().values())
    return [value.clone() for value in whole]


def test_a_rank_that_takes_over_shards_goes_on_as_the_one_that_gave_them(pod: PodGroup) -> None:
    (model, optimizer), (other, others) = sharded(pod, 0), sharded(pod, 1)
    for _ in range(3):
        step(model, optimizer)
    state = LocalShards(model, optimizer).state_dict()
    assert not any(isinstance(value, DTensor) for value in state["model"].values())
    LocalShards(other, others).load_state_dict(copy.deepcopy(state))
    assert len(others.state) == 2, "a parameter that has had no gradient has a state"
    step(model, optimizer)
    step(other, others)
    assert all(torch.equal(one, two) for one, two in zip(values(model), values(other), strict=True))
