"""`--profile 10:15`: what every rank does in steps 10 to 15, as a trace for chrome://tracing, Perfetto or
TensorBoard.

One file a rank in logs/<job>/profile. Recording slows the steps down and the first of them most, so choose
steps after the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ddp_trainer.rank.world import World
from ddp_trainer.train.config import StepWindow


class Profiler:
    """Records the steps of `window`, counted in the whole run; nothing at all without one."""

    def __init__(self, window: StepWindow | None, directory: Path, world: World) -> None:
        self._window = window
        self._directory = directory
        self._world = world
        self._profile: Any = None

    def before_step(self, step: int) -> None:
        """Step number `step` is about to begin; also again, where another rank was lost in it.

        The first of the window that this process takes need not be the first of all: it may have resumed after that.
        """
        if self._window is None or not self._window.first <= step <= self._window.last:
            return
        if self._profile is not None:  # torch records one at a time
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                str(self._directory), worker_name=f"rank-{self._world.rank}"
            ),
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        )
        self._profile.start()

    def after_step(self, step: int) -> Path | None:
        """Step number `step` is done; where the trace was written, if it was the last of the window."""
        if self._profile is None:
            return None
        assert self._window is not None
        if step < self._window.last:
            return None
        self._profile.stop()
        self._profile = None
        return self._directory
