"""The arithmetic of a step: which type the forward pass computes in, and how a gradient becomes an update in
it.

fp32 needs nothing. bf16 has the range of fp32, so autocast is all. fp16 does not: its gradients underflow
unless the loss is scaled up first, a step whose scaled gradient overflowed is skipped, and clipping must see
the unscaled gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """One of fp32, bf16 and fp16 on one device. Its state, the scale and the count of skipped steps, belongs
    in the snapshot.
    """

    def __init__(self, name: str, device: torch.device, scaler: Mapping[str, Any] | None = None) -> None:
        """`scaler` has arguments of GradScaler."""
        self.name = name
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type, **scaler or {}) if name == "fp16" else None
        self._scale = self._scaler.get_scale() if self._scaler else 1.0
        self.skipped_steps = 0

    @property
    def live(self) -> dict[str, torch.amp.GradScaler]:
        """What says itself when it changes the weights, besides the optimizer."""
        return {"scaler": self._scaler} if self._scaler else {}

    @property
    def plotted(self) -> dict[str, float]:
        """What is shown with the loss."""
        return {"train/skipped_steps": self.skipped_steps} if self._scaler else {}

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass and the loss; not for the backward pass, which follows the forward's types."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=AUTOCAST[self.name])

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward is called on."""
        return self._scaler.scale(loss) if self._scaler else loss

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Tensor] | None) -> tuple[Tensor | None, bool]:
        """Clip the gradient, if `clip` is given, and take the step, unless fp16 overflowed in it.

        The norm of the gradient before it was clipped, None where it is not known or may be infinite in fp16, and
        whether the step was skipped.
        """
        if self._scaler is None:
            norm = clip() if clip else None
            optimizer.step()
            return norm, False
        if clip:
            self._scaler.unscale_(optimizer)
            clip()
        self._scaler.step(optimizer)
        self._scaler.update()
        before, self._scale = self._scale, self._scaler.get_scale()
        skipped = self._scale < before
        self.skipped_steps += skipped
        return None, skipped

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"name": self.name, "skipped_steps": self.skipped_steps}
        if self._scaler:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run may go on in another precision: a scaler that finds no state of its own starts afresh.

        One that does goes on with that scale, by the settings of this run: torch would take over the saved ones.
        """
        self.skipped_steps = state["skipped_steps"]
        if self._scaler and "scaler" in state:
            saved, own = state["scaler"], self._scaler.state_dict()
            # torch lets the scale grow where the two are equal: with more steps than the interval, never
            steps = min(saved["_growth_tracker"], own["growth_interval"] - 1)
            self._scaler.load_state_dict({**own, "scale": saved["scale"], "_growth_tracker": steps})
            self._scale = self._scaler.get_scale()
