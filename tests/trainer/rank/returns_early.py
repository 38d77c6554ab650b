"""A function makes a model, leaves the process group with a collective of a backward pass under way, and returns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.zeros(1, 1)).sum().backward()
    scale = torch.ones(1, requires_grad=True)
    takes_long = torch.zeros(30_000_000)
    scale.register_hook(lambda _: dist.all_reduce(takes_long, async_op=True) and None)
    scale.sum().backward()
    dist.destroy_process_group()


main()
print("returned")
