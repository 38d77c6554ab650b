"""Ranks that hold the whole model: equal weights at first, rank 0's running statistics, and the sum of all gradients.

What DistributedDataParallel does in its hooks, as plain collectives, each started by `dist` and waited for by `wait`:
with live recovery that notices a lost rank. One rank alone starts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Wait = Callable[[dist.Work], None]


def waited(work: dist.Work) -> None:
    """Wait as torch does."""
    work.wait()


def from_first(tensors: Iterable[Tensor], wait: Wait = waited) -> None:
    """Rank 0's values in the tensors of all ranks, all of them under way at once."""
    # Backends send memory as it lies, of contiguous tensors, and each of some types only: bytes are among them.
    pairs = [(tensor, tensor.contiguous()) for tensor in tensors]
    works = [dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0, async_op=True) for _, whole in pairs]
    for (tensor, whole), work in zip(pairs, works, strict=True):
        wait(started(work))
        if whole is not tensor:
            tensor.copy_(whole)


def persistent_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Those that a snapshot holds, such as running statistics. Each once, and without a state dict of all weights."""
    seen: set[int] = set()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer


def shared_gradients(
    parameters: Iterable[Tensor],
    device: torch.device,
    wait: Wait = waited,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """The gradients to reduce, of the same parameters on every rank of `group`, by default of all.

    A parameter that some rank used has one everywhere, of zeros where it was not used. One that no rank used keeps
    none, or an optimizer with weight decay or momentum would change it all the same.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8, device="cpu")
    used = used.to(device)
    wait(started(dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group, async_op=True)))
    gradients = []
    for parameter, somewhere in zip(trained, used.tolist(), strict=True):
        if not somewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def sum_gradients(gradients: Sequence[Tensor], wait: Wait = waited, group: dist.ProcessGroup | None = None) -> None:
    """Make each the sum of all ranks' of `group`, by default of all, all of them under way at once."""
    for work in [started(dist.all_reduce(gradient, group=group, async_op=True)) for gradient in gradients]:
        wait(work)


def started(work: dist.Work | None) -> dist.Work:
    """What a collective of this process's own group returns."""
    assert work is not None, "this process is not of the group"
    return work
