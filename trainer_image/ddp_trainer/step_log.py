"""What the curves and a person see of a run's steps: losses, the learning rate, and how fast it goes."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

from ddp_trainer.agreement import Verdict
from ddp_trainer.runlog import RunLog

THROUGHPUT_WINDOW: Final = 50
SAY_SECONDS: Final = 1.0


class StepLog:
    """Counts what is trained on, and writes to `log` what came of it."""

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

    def plot(self, verdict: Verdict, *, learning_rate: float, skipped_steps: int | None) -> None:
        """One point of each curve, and at most once a second a line for people. `skipped_steps` is None where no step
        can be skipped.
        """
        rate = self.samples_per_second
        values = {"train/loss": verdict.loss, "train/learning_rate": learning_rate}
        if rate is not None:
            values["train/samples_per_second"] = rate
        if skipped_steps is not None:
            values["train/skipped_steps"] = skipped_steps
        self._log.scalars(verdict.step, values)
        if time.monotonic() - self._said_at >= SAY_SECONDS:
            self._said_at = time.monotonic()
            speed = "" if rate is None else f", {rate:.0f} samples/s"
            self._log.say(
                f"step {verdict.step} of {self._total_steps}, epoch {verdict.epoch}, loss {verdict.loss:.4f}{speed}"
            )
