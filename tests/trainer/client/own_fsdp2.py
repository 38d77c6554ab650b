"""A loop of a user's own with a model that fully_shard splits among the ranks, one of whose heads is not used yet."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ddp_trainer

STEPS = 10


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(6, 4)
        self.later = torch.nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(TwoHeads())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
run = ddp_trainer.attach(model, optimizer, scheduler=scheduler, total_steps=STEPS)
for step in range(run.resume(), STEPS):
    inputs = torch.rand(8, 6, generator=torch.Generator().manual_seed(step))
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.step_end(loss)
    if step + 1 == int(os.environ.get("DIES_AT", "0")):
        raise RuntimeError("seeded")
run.finish()
dist.destroy_process_group()
