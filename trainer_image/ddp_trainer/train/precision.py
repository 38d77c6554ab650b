"""The arithmetic of a step: which type the forward pass computes in, and how a gradient becomes an update in
it.

fp32 needs nothing. bf16 has the range of fp32, so autocast is all. fp16 does not: its gradients underflow
unless the loss is scaled up first, a step whose scaled gradient overflowed is skipped, and clipping must see
the unscaled gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """One of fp32, bf16 and fp16 on one device. Its state, the scale and the count of skipped steps, belongs
    in the snapshot.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self.skipped_steps = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass and the loss; not for the backward pass, which follows the forward's types."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=AUTOCAST[self.name])

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward is called on."""
        return self._scaler.scale(loss) if self._scaler else loss

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any] | None) -> None:
        """Clip the gradient, if `clip` is given, and take the step, unless fp16 overflowed in it."""
        if self._scaler is None:
            if clip:
                clip()
            optimizer.step()
            return
        if clip:
            self._scaler.unscale_(optimizer)
            clip()
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self.skipped_steps += self._scaler.get_scale() < before

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"name": self.name, "skipped_steps": self.skipped_steps}
        if self._scaler:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run may go on in another precision: a scaler that finds no state of its own starts afresh."""
        self.skipped_steps = state["skipped_steps"]
        if self._scaler and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
