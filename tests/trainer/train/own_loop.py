"""A training loop of a user's own, as it stands in a tutorial, with the three lines of ddp_trainer added."""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_trainer

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=30)
arguments.add_argument("--sigterm-at", type=int, default=0)
arguments.add_argument("--raise-at", type=int, default=0)
arguments.add_argument("--no-update-at", type=int, default=0)
arguments.add_argument("--no-update-on", type=int, nargs="+", default=[0, 1], help="these ranks")
arguments = arguments.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.rand(256, 20)
y = x.sum(dim=1, keepdim=True)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

run = ddp_trainer.attach(model, optimizer, scheduler=scheduler, global_batch=32, total_steps=arguments.steps)
strikes = dist.get_rank() == 1 and os.environ["DDPJOB_ATTEMPT"] == "0"
for step in range(run.resume(), arguments.steps):
    if strikes and step + 1 == arguments.raise_at:
        raise ValueError("a sample that cannot be trained on (seeded)")
    chosen = torch.randint(0, 256, (16,))
    loss = torch.nn.functional.mse_loss(model(x[chosen]), y[chosen])
    optimizer.zero_grad()
    loss.backward()
    if strikes and step + 1 == arguments.sigterm_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if step + 1 != arguments.no_update_at or dist.get_rank() not in arguments.no_update_on:
        optimizer.step()
    scheduler.step()
    run.step_end(loss)
    if run.should_stop():
        break
run.finish()
