"""The loop that people write by hand around the same steps of 50 ms: DistributedDataParallel, AdamW, nothing else.

torchrun tests/benchmarks/paced_loop.py BATCH; the batch is that of one rank.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tests.benchmarks.paced_task import Paced
from tests.benchmarks.turns import Turns
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler


def main(batch: int) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    task = Paced()
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = task.eval_dataset()
    loader = DataLoader(data, batch, sampler=RandomSampler(data), drop_last=True)  # type: ignore[arg-type]
    turns = Turns("bare")
    while True:
        for images, labels in loader:
            if not turns.step():
                return
            optimizer.zero_grad()
            task.loss(model(images), (images, labels)).backward()
            optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    dist.destroy_process_group()
