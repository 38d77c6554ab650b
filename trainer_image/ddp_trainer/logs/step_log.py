"""What is logged of a run's steps: loss, learning rate and throughput."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

from ddp_trainer.logs.runlog import RunLog
from ddp_trainer.rank.step_reduce import StepResult

THROUGHPUT_WINDOW: Final = 50
SAY_SECONDS: Final = 1.0


class StepLog:
    """Measures throughput, and writes the metrics of steps to `log`."""

    def __init__(self, log: RunLog, total_steps: int) -> None:
        self._log = log
        self._total_steps = total_steps
        self._recent: deque[tuple[float, int]] = deque(maxlen=THROUGHPUT_WINDOW)
        self._said_at = -math.inf

    @property
    def samples_per_second(self) -> float | None:
        """Over the last steps, of all ranks together; None after one step, which measures nothing."""
        if len(self._recent) < 2:
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        trained = sum(samples for _, samples in self._recent) - self._recent[0][1]
        return trained / seconds if seconds else None

    def trained(self, samples: int) -> None:
        """A step on so many samples, of all ranks together, has just ended."""
        self._recent.append((time.monotonic(), samples))

    def paused(self) -> None:
        """The time since the last step is no step's."""
        self._recent.clear()

    def plot(self, result: StepResult, *, learning_rate: float, skipped_steps: int | None) -> None:
        """Write the metrics of a step, and at most once a second a line for people. `skipped_steps` is None where no
        step can be skipped.
        """
        rate = self.samples_per_second
        values = {"train/loss": result.loss, "train/learning_rate": learning_rate}
        if rate is not None:
            values["train/samples_per_second"] = rate
        if skipped_steps is not None:
            values["train/skipped_steps"] = skipped_steps
        self._log.scalars(result.step, values)
        if time.monotonic() - self._said_at >= SAY_SECONDS:
            self._said_at = time.monotonic()
            speed = "" if rate is None else f", {rate:.0f} samples/s"
            self._log.say(
                f"step {result.step} of {self._total_steps}, epoch {result.epoch}, loss {result.loss:.4f}{speed}"
            )
