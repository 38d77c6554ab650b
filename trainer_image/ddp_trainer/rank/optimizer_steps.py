"""How many steps an optimizer has made, by its own count, which comes back with its state."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


def steps_of(optimizer: Optimizer) -> int | None:
    """The most steps that a parameter of `optimizer` has had; None where it does not count, as SGD.

    The counts may lie on a GPU, and reading them waits for what is queued there: ask once.
    """
    counts = [int(count) for count in _counts(optimizer) if count >= 1 and count == int(count)]
    return max(counts, default=None)


def _counts(optimizer: Optimizer) -> Iterator[float]:
    import torch

    for entry in (*optimizer.state.values(), *optimizer.param_groups):  # apex and others count by groups
        count = entry.get("step") if isinstance(entry, dict) else None
        if type(count) is torch.Tensor and count.numel() == 1:  # a DTensor might ask other ranks
            if not (count.is_cuda and torch.cuda.is_current_stream_capturing()):  # to read ends the capture of a graph
                yield count.item()
        elif isinstance(count, Real):
            yield float(count)
