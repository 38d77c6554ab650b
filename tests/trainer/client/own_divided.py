"""A loop of a user's own whose optimizer divides its state among the ranks, or does not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

import ddp_trainer


class Divided(torch.optim.Optimizer):
    """Each rank has the momentum of its rows of a weight, computes these, and gets the others."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for weight in group["params"]:
                rows = weight.shape[0] // size
                own = slice(rank * rows, (rank + 1) * rows)
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight[own]))
                momentum.mul_(0.9).add_(weight.grad[own])
                parts = [torch.empty_like(momentum) for _ in range(size)]
                dist.all_gather(parts, weight[own] - group["lr"] * momentum)
                weight.copy_(torch.cat(parts))


dist.init_process_group("gloo")
torch.manual_seed(0)
linear = torch.nn.Linear(3, 2, bias=False)
with torch.no_grad():
    linear.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]))
model = torch.nn.parallel.DistributedDataParallel(linear)
divides = os.environ["DIVIDES"] == "yes"
optimizer = Divided(model.parameters()) if divides else torch.optim.Adam(model.parameters(), lr=0.1)
run = ddp_trainer.attach(model, optimizer, total_steps=4)
for _ in range(run.resume(), 4):
    optimizer.zero_grad()
    loss = model(torch.rand(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    run.step_end(loss)
run.finish()
dist.destroy_process_group()
