"""The reduction of each step on a device, with tensors of the host in the place of the device's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_trainer.contract.outcomes import classify
from ddp_trainer.rank import step_reduce
from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.rank.world import World

ZEROS = torch.zeros


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have tensors of the host for those of CUDA; notes what has waited for the device."""
    found: list[str] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: found.append("event"), query=lambda: True)
    monkeypatch.setattr(step_reduce.torch, "Event", lambda device: event)
    monkeypatch.setattr(step_reduce.torch, "zeros", lambda *shape, **kwargs: ZEROS(*shape, dtype=torch.float64))
    return found


@pytest.fixture
def of_two(waits: list[str]) -> StepReduce:
    """That of a rank of two on CUDA."""
    return StepReduce(World(rank=0, size=2, device=torch.device("cuda", 0)))


def _reduces(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have an all-reduce of NCCL, which the device waits for and the host does not, leave `change` in the buffer."""

    def all_reduce(buffer: torch.Tensor, async_op: bool) -> Any:
        change(buffer)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def test_the_sum_of_all_ranks_is_the_result(of_two: StepReduce, monkeypatch: pytest.MonkeyPatch) -> None:
    _reduces(monkeypatch, lambda buffer: buffer.mul_(2))
    of_two.start(torch.tensor(1.5), step=7, epoch=1, stop=True, gradient_norm=3.0, joining=False, has_drawn=False)
    result = of_two.result()
    assert result is not None
    assert (result.step, result.loss, result.gradient_norm) == (7, 3.0, 3.0)
    assert (result.stopping, result.joining, result.has_drawn) == (2, False, False)


class OnDevice(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("current", "waited_for"), [(-1, ["event"]), (1, [])], ids=["its own device", "another"])
def test_a_loss_on_the_gpu_of_a_program_without_a_process_group_is_read_when_it_has_arrived(
    current: int, waited_for: list[str], waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Lightning on one GPU. A tensor of the host is on device -1."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    reduction = StepReduce(World(rank=0, size=1, device=torch.device("cpu")))
    for step in (7, 8):
        reduction.start(torch.tensor(1.5).as_subclass(OnDevice), step=step, epoch=1, stop=True)
        result = reduction.result()
        assert result is not None
        assert (result.step, result.loss, result.stopping) == (step, 1.5, 1)
    assert waits == 2 * waited_for


@pytest.mark.parametrize("left", [lambda buffer: buffer, lambda buffer: buffer.zero_()], ids=["its own", "nothing"])
def test_a_sum_that_lacks_a_rank_is_a_lost_peer_and_no_result(
    of_two: StepReduce, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the buffer is left where the watchdog aborts the communicator in the middle of a collective."""
    _reduces(monkeypatch, left)
    of_two.start(torch.tensor(1.5), step=7, epoch=1, stop=False)
    for _ in range(2):  # a snapshot that asks after the failure gets no result either
        with pytest.raises(RuntimeError, match="of 2 ranks are in the sum of the last step") as lost:
            of_two.result()
    assert classify(lost.value)[1] == "PeerLost"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_a_device_whose_group_takes_no_tensors_of_the_host_reduce_on_the_host(size: int) -> None:
    """As Intel's GPUs with XCCL and Gaudi with HCCL, which are not here: gloo that is asked for these alone."""
    dist.init_process_group("xpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reduction = StepReduce(World(rank=0, size=size, device=torch.device("xpu", 0)))
        reduction.start(torch.tensor(1.5), step=7, epoch=1, stop=True)
        result = reduction.result()
    finally:
        dist.destroy_process_group()
    assert result is not None
    assert (result.step, result.loss, result.stopping) == (7, 1.5, 1)
