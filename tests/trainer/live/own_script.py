"""A script that trains with `attach_live`, for tests that end its ranks; each process writes down what it trains on.

    own_script.py --steps 60 [--ranks 3] [--killed-after 30] [--own-batches]

With fewer than `--ranks`, a few steps are taken, and then a new rank is waited for (`live_tasks`). With
`--killed-after`, the last rank is killed after that step. `--own-batches`
takes the batches of an iterator that begins with the process, which is an error once a rank joins.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from live_tasks import ALONE_STEPS, Victim, await_new_rank
from recorded_task import HISTORY, digest
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import ddp_trainer
from ddp_trainer.tasks.digits import CLASSES, SIDE, Digits

GLOBAL_BATCH = 24


class Passes:
    """A state of the program's own that a pass changes."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["passes"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--killed-after", type=int)
    parser.add_argument("--own-batches", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(int(os.environ["DDPJOB_NODE_RANK"]))  # rank 0's weights are everybody's
    images, labels = Digits().train_dataset().tensors  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(SIDE * SIDE, affine=False).eval(), nn.Linear(SIDE**2, CLASSES))
    # a fused optimizer goes through the memory of a weight and its moments from one end to the other
    model[-1].weight = nn.Parameter(model[-1].weight.detach().t().contiguous().t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    average, passes = AveragedModel(model), Passes()
    run = ddp_trainer.attach_live(
        model,
        optimizer,
        scheduler=scheduler,
        average=average,
        passes=passes,
        global_batch=GLOBAL_BATCH,
        total_steps=options.steps,
        changes_with_optimizer=("average",),
    )
    run.resume()
    history: Any = None
    if folder := os.environ.get(HISTORY):
        path = Path(folder) / f"{os.environ['DDPJOB_NODE_RANK']}-{uuid.uuid4().hex}"
        history = path.open("w", buffering=1)
    waited_steps: set[int] = set()
    victim = None if options.killed_after is None else Victim(options.killed_after)

    def write(**line: Any) -> None:
        if history is None:
            return
        view = run._membership.view.number if run._membership is not None and run._membership.view is not None else 0
        history.write(json.dumps({"view": view, "step": run.step + 1, **line}) + "\n")

    def loss_of(share: Tensor) -> Tensor:
        assert len(share) <= -(-GLOBAL_BATCH // options.ranks)
        pace()
        passes.count += 1
        torch.rand(3)
        write(samples=share.tolist())
        return functional.cross_entropy(model(images[share]), labels[share])

    def pace() -> None:
        if victim is not None:
            victim.step()
        time.sleep(options.seconds)
        if dist.is_initialized() and dist.get_world_size() < options.ranks and run._membership is not None:
            waited_steps.add(run.step)
            time.sleep(options.seconds * 5)
            if len(waited_steps) > ALONE_STEPS:
                await_new_rank()
        else:
            waited_steps.clear()

    def update() -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        write(
            time=time.time(),
            ranks=dist.get_world_size() if dist.is_initialized() else 1,
            lr=rate,
            weights=digest(model.state_dict().values()),
        )

    batches = run.batches(len(labels))
    if options.own_batches:
        batches = iter(torch.arange(len(labels)).split(GLOBAL_BATCH))
    for batch in batches:
        run.train_step(batch, loss_of, update)
        if run.should_stop():
            break
    if not run.should_stop():
        write(average=sum(float(value.double().sum()) for value in average.module.parameters()))
    run.finish()


if __name__ == "__main__":
    main()
