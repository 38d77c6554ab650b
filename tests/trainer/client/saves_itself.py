"""A training loop that saves with torch.save, as it stands in a tutorial, in `run.checkpoint`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_trainer

STEPS = 12
strikes = os.environ.get("RANK") == "1" and os.environ["DDPJOB_ATTEMPT"] == "0"
dies_in_block, stops_at = (int(os.environ.get(name, "0")) for name in ("DIES_IN_BLOCK", "STOPS_AT"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

run = ddp_trainer.attach(total_steps=STEPS)
if folder := run.latest():
    states = torch.load(folder / "states.pt")
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
for step in range(run.resume(), STEPS):
    inputs = torch.rand(8, 4, generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with (Path(os.environ["DDPJOB_SHARED"]) / "losses.jsonl").open("a") as file:
            file.write(json.dumps([step + 1, loss.item()]) + "\n")
    if strikes and step + 1 == stops_at:
        os.kill(os.getpid(), signal.SIGTERM)
    run.step_end(loss)
    if run.should_save():
        with run.checkpoint() as folder:
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "states.pt")
            else:
                (folder / f"rank-{dist.get_rank()}").write_bytes(b"half of what this rank has")
            if strikes and step + 1 == dies_in_block:
                os.kill(os.getpid(), signal.SIGKILL)
    if run.should_stop():
        break
run.finish()
dist.destroy_process_group()
