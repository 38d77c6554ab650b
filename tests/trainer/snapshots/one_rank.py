"""A small training run of one rank and its snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_trainer.snapshots.codec.state import Stateful
from ddp_trainer.snapshots.session import Identity, Progress, SaveInterval, SnapshotEvent, Snapshots


class Cursor:
    """A stand-in for the data cursor."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.samples = state["samples"]


class Run:
    """A small training run: dropout and random data, AdamW, a scheduler, and its snapshots."""

    def __init__(
        self, directory: Path, *, attempt: int = 0, every: str = "2steps", seed: int = 0, **settings: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7])
        self.cursor = Cursor()
        self.events: list[SnapshotEvent] = []
        self.losses: list[float] = []
        stateful: dict[str, Stateful] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "cursor": self.cursor
        }  # fmt: skip
        own = {"keep": 3, "strategy": "single", "global_batch": 16}
        settings = own | {"identity": Identity("digits", "uid-1", 1, attempt, 0, 1)} | settings
        self.snapshots = Snapshots(
            directory,
            stateful,
            every=SaveInterval.parse(every),
            on_event=self.events.append,
            **settings,
        )

    def train(self, until: int) -> None:
        while self.cursor.samples < until * 16:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(16, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.cursor.samples += 16
            self.losses.append(loss.item())
            step = self.cursor.samples // 16
            self.snapshots.step_end(Progress(step, step // 5, self.cursor.samples), epoch_end=step % 5 == 0)

    def results(self) -> list[str]:
        return [event.result for event in self.events]
