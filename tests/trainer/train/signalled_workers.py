"""Loads with workers as a rank on CUDA does, on a forkserver, and gets torchrun's SIGTERM to the whole process group
before the workers start, and between two batches. Prints how many samples it has loaded.
"""

from __future__ import annotations

import os
import signal
import warnings

import torch
from torch.utils.data import TensorDataset, default_collate

from ddp_trainer.rank.world import World
from ddp_trainer.train.data_workers import WorkerPool

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    pool = WorkerPool(
        TensorDataset(torch.arange(8)),
        seed=0,
        collate=default_collate,
        workers=2,
        prefetch=1,
        world=World(device=torch.device("cuda")),
    )
    os.killpg(0, signal.SIGTERM)
    loaded = 0
    for (batch,) in pool.load([(0, torch.tensor([index, index + 1])) for index in range(0, 8, 2)]):
        loaded += len(batch)
        os.killpg(0, signal.SIGTERM)
    print(f"loaded {loaded}")
