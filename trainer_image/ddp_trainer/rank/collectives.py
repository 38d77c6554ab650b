"""Collectives on one tensor, by their names in torch 2.13 and newer, which warns of those that older torch has."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
