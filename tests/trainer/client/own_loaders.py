"""A loop of a user's own in which each rank has a cursor of its own, with a tensor in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_trainer


class Cursor:
    """Where this rank stands in data of its own, and how it shuffles them."""

    def __init__(self, rank: int) -> None:
        self.position = 1000 * rank
        self.generator = torch.Generator().manual_seed(rank)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])

    def draw(self) -> torch.Tensor:
        self.position += 1
        return torch.rand(4, 3, generator=self.generator)


steps = int(os.environ["STEPS"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cursor = Cursor(dist.get_rank())
run = ddp_trainer.attach(model, optimizer, per_rank={"cursor": cursor}, total_steps=steps)
for _ in range(run.resume(), steps):
    optimizer.zero_grad()
    loss = model(cursor.draw()).square().mean()
    loss.backward()
    optimizer.step()
    run.step_end(loss)
run.finish()
seen = {"position": cursor.position, "next": cursor.draw().tolist()}
(Path(os.environ["DDPJOB_SHARED"]) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.destroy_process_group()
