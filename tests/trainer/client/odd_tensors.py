"""Tensors that no backend sends as they are: rank 0's values in those of all ranks, left as JSON below a folder.

odd_tensors.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_trainer.client.gradients import from_first

dist.init_process_group("gloo")
rank = dist.get_rank()
base = torch.arange(8.0) + 10 * rank
tensors = {
    "slice": base[::2],
    "transposed": torch.arange(6.0).reshape(2, 3).T + 10 * rank,
    "short": torch.arange(3, dtype=torch.int16) + 10 * rank,
    "flag": torch.tensor(rank == 0),
    "number": torch.tensor(3.5 + rank, dtype=torch.float64),
    "empty": torch.empty(0),
}
from_first(tensors.values())
found = {name: tensor.tolist() for name, tensor in tensors.items()}
Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found | {"between": base[1::2].tolist()}))
dist.destroy_process_group()
