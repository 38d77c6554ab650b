"""The loop that people write by hand: TinyTransformerLM, AdamW, nothing else; DistributedDataParallel on several ranks.

python tests/benchmarks/bare_loop.py BATCH DEVICE, or the same under torchrun. The batch is that of one rank, the device
is cpu or cuda.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from tests.benchmarks.turns import Turns
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.tasks.tiny_lm import TinyLM


def main(batch: int, kind: str) -> None:
    torch.manual_seed(0)
    task = TinyLM()
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    model: torch.nn.Module = task.model().to(device)
    tokens = task.train_dataset()
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    turns = Turns("bare")
    while True:
        for chosen in torch.randperm(len(tokens), generator=generator).split(batch):  # type: ignore[arg-type]
            if not turns.step():
                return
            data = tokens[chosen].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data)[:, :-1].flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    if dist.is_initialized():
        dist.destroy_process_group()
