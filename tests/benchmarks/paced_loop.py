"""The loop that people write by hand around the same steps of 50 ms: DistributedDataParallel, AdamW, nothing else.

torchrun tests/benchmarks/paced_loop.py BATCH [--reduces]; the batch is that of one rank. With `--reduces` it also sends
the few numbers that the product's ranks agree on in each step, and nothing else.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tests.benchmarks.paced_task import Paced
from tests.benchmarks.turns import Turns
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.rank.world import describe_world

REDUCES = "--reduces"


def main(batch: int, *, reduces: bool) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    task = Paced()
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = task.eval_dataset()
    loader = DataLoader(data, batch, sampler=RandomSampler(data), drop_last=True)  # type: ignore[arg-type]
    turns = Turns(REDUCES if reduces else "bare")
    reduction = StepReduce(describe_world(device="cpu"))
    while True:
        for images, labels in loader:
            if not turns.step():
                return
            optimizer.zero_grad()
            loss = task.loss(model(images), (images, labels))
            loss.backward()
            optimizer.step()
            if reduces:
                reduction.result()
                reduction.start(loss.detach(), step=1, epoch=0, stop=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), reduces=REDUCES in sys.argv)
    dist.destroy_process_group()
