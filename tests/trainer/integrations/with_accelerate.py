"""A script with Accelerate, as it stands in a tutorial, and the two functions."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import ddp_trainer
from ddp_trainer.integrations.accelerate import load_state, save_state

STEPS, DIES_AT = 12, int(os.environ.get("DIES_AT", "0"))

accelerator = Accelerator(cpu=True)
torch.manual_seed(1 + accelerator.process_index)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model, optimizer = accelerator.prepare(model, optimizer)

run = ddp_trainer.attach(total_steps=STEPS)
for step in range(load_state(run, accelerator), STEPS):
    time.sleep(float(os.environ.get("PACE", "0")))
    inputs = torch.rand(8, 4)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    run.step_end(loss)
    if accelerator.is_main_process:
        with (Path(os.environ["DDPJOB_SHARED"]) / "losses.jsonl").open("a") as file:
            file.write(json.dumps([step + 1, loss.item()]) + "\n")
    if step + 1 == DIES_AT and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.should_save():
        save_state(run, accelerator)
    if run.should_stop():
        break
run.finish()
