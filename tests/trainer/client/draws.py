"""A loop that draws random numbers in the steps it is told, on rank 1 alone, and fails in one.

draws.py --draws-in STEP… --fails-in STEP
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_trainer

arguments = argparse.ArgumentParser()
arguments.add_argument("--draws-in", type=int, nargs="+")
arguments.add_argument("--fails-in", type=int, default=0)
arguments = arguments.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.rand(256, 20)
y = x.sum(dim=1, keepdim=True)
model = DistributedDataParallel(torch.nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run = ddp_trainer.attach(model, optimizer, global_batch=32, total_steps=20)
for step in range(run.resume(), 20):
    draws = dist.get_rank() == 1 and step + 1 in arguments.draws_in
    chosen = torch.randint(0, 256, (16,)) if draws else torch.arange(step, step + 16)
    loss = torch.nn.functional.mse_loss(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    if dist.get_rank() == 1 and step + 1 == arguments.fails_in and os.environ["DDPJOB_ATTEMPT"] == "0":
        raise ValueError("a sample that cannot be trained on (seeded)")
    loss.backward()
    optimizer.step()
    run.step_end(loss)
run.finish()
