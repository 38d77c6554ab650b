"""Whether what a snapshot takes from rank 0 is the same on the other ranks too.

Some optimizers divide their state among the ranks by themselves, as nanochat's MuonAdamW does: each rank has the
moments of its part of the weights. Neither their class nor a shape says so. A snapshot would hold those of rank 0, and
all ranks would go on with them after a resume, without an error. So a few values of all ranks are compared, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

AFTER_STEPS: Final = 2
"""Steps of an attempt, after which an optimizer has its state, unless a gradient scaler skips them."""
MOST: Final = 64
"""Tensors of which values are compared."""
APART: Final = 0.5
"""Values that differ by more than this share of the larger one are of other parts, not of another rounding."""
LEAST: Final = 1e-30
"""What is smaller counts as 0."""

Sample = Mapping[str, Sequence[float]]


def sampled(optimizers: Mapping[str, Optimizer]) -> Sample:
    """Two values of each of some tensors in their states, by a name that is the same on all ranks."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # another stream may still write them, and memory that the host shares with the GPU waits for none
        torch.cuda.synchronize()
    tensors = {
        f"{name}/{index}/{key}": value
        for name, optimizer in optimizers.items()
        for index, entry in enumerate(_entries(optimizer))
        for key, value in entry.items()
        if isinstance(value, Tensor) and _has_values(value)
    }
    names = list(tensors)[:: max(1, -(-len(tensors) // MOST))]
    numbers = iter(_numbers([value for name in names for value in _two_of(tensors[name])]))
    return {name: [next(numbers), next(numbers)] for name in names}


def unlike(of_ranks: Sequence[Sample]) -> str | None:
    """The first name by which ranks have different values, or some have none; None where all are alike."""
    names = dict.fromkeys(name for sample in of_ranks for name in sample)
    return next((name for name in names if _differ([sample.get(name) for sample in of_ranks])), None)


def _entries(optimizer: Optimizer) -> list[Mapping[str, object]]:
    """By parameter; empty for one that has no state, or one of another kind than torch's optimizers have."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return []
    entries = [state.get(weight) for group in optimizer.param_groups for weight in group["params"]]
    return [entry if isinstance(entry, Mapping) else {} for entry in entries]


def _has_values(value: Tensor) -> bool:
    """A counter of steps is the same whatever is divided, and a tensor of another kind may ask other ranks."""
    return (
        type(value) is Tensor
        and value.numel() > 1
        and value.layout is torch.strided
        and (value.is_floating_point() or value.dtype in (torch.int8, torch.uint8))
        and not value.is_meta
    )


def _two_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor[(0,) * tensor.ndim], tensor[tuple(size // 2 for size in tensor.shape)]


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Waits for each device once."""
    found = [0.0] * len(values)
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value.device, []).append(place)
    for of_device in places.values():
        numbers: list[float] = torch.stack([values[place].detach().float() for place in of_device]).tolist()
        for place, number in zip(of_device, numbers, strict=True):
            found[place] = number
    return found


def _differ(of_ranks: Sequence[Sequence[float] | None]) -> bool:
    found = [values for values in of_ranks if values is not None]
    if len(found) < len(of_ranks):
        return True
    return any(_are_apart(values) for values in zip(*found, strict=True))


def _are_apart(values: Sequence[float]) -> bool:
    largest = max(abs(value) for value in values)
    return largest > LEAST and max(values) - min(values) > APART * largest
