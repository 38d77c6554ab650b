"""States back into the objects that they came from, where what these do by themselves is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_trainer.snapshots.codec.state import Stateful


def load_into(value: Stateful, state: Any) -> None:
    """Have `value` take over `state`, which its `state_dict` returned and a snapshot or another rank has held."""
    with loading(value) if isinstance(value, Optimizer) else nullcontext():
        value.load_state_dict(state)


@contextmanager
def loading(optimizer: Optimizer) -> Iterator[None]:
    """Around what has `optimizer` load its state.

    Afterwards its tensors lie in memory as their parameters do: a file has them in the order of their indices, an
    optimizer keeps the tensors that it is given, and a fused one goes through the memory of a parameter and its moments
    from one end to the other. With a model in channels_last each moment would be another weight's.
    """
    yield
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and _lies_otherwise(value, parameter):
                    state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _lies_otherwise(value: Tensor, parameter: Tensor) -> bool:
    own, its = _on_this_rank(value), _on_this_rank(parameter)
    return own.layout == its.layout == torch.strided and own.shape == its.shape and own.stride() != its.stride()


def _on_this_rank(tensor: Tensor) -> Tensor:
    """Of a DTensor its part, which is a plain tensor in memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
