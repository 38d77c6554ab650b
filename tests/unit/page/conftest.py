"""A shared folder as `ddpjob run` leaves it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpjob_operator.local.record import status_file

START = 1_893_456_000.0
TIME = "2030-01-01T00:00:{:02}+00:00"


@dataclass(frozen=True)
class Folder:
    """Writes what a run would."""

    root: Path

    def status(self, job: str, places: object = (), **status: Any) -> None:
        content = {"version": 1, "job": job, "uid": "u", "created": TIME.format(0), "nodes": 2, "procsPerNode": 2}
        self.write(status_file(self.root, job), json.dumps(content | {"places": places, "status": status}))

    def holds(self, job: str, pid: int = os.getpid(), **more: Any) -> None:
        """As a run of this machine does."""
        holder = json.dumps({"pid": pid, "host": os.uname().nodename} | more)
        self.write(self.root / "checkpoints" / job / "run.lock", holder)

    def losses(
        self,
        job: str,
        attempt: int,
        resumed_after: int,
        losses: Iterable[float | None],
        uid: str = "u",
        created: int = 0,
        rate: float | None = None,
    ) -> None:
        lines = [{"attempt": attempt, "resumedAfter": resumed_after}]
        lines += [
            {"step": resumed_after + 1 + index, "epoch": 0, "loss": loss, "attempt": attempt, "samplesPerSecond": rate}
            for index, loss in enumerate(losses)
        ]
        path = self.root / "logs" / job / "losses" / f"{int(START) + created:012}-{attempt:06}-{uid}.jsonl"
        self.write(path, "".join(f"{json.dumps(line)}\n" for line in lines))

    def events(self, job: str, *events: dict[str, Any]) -> None:
        lines = [{"time": START + index, "attempt": 0} | event for index, event in enumerate(events)]
        path = self.root / "logs" / job / "events.jsonl"
        self.write(path, "".join(f"{json.dumps(line)}\n" for line in lines))

    def log(self, pod: str, text: str) -> Path:
        job = pod.rsplit("-", 2)[0]
        path = self.write(self.root / "logs" / job / "pods" / f"{pod}.log", text)
        os.utime(path, (START, START))
        return path

    def snapshot(self, job: str, step: int, **manifest: Any) -> None:
        content = {"version": 1, "step": step, "time": START, "attempt": 0, "kind": "periodic", "files": {}} | manifest
        self.write(self.root / "checkpoints" / job / f"step-{step:012}" / "manifest.json", json.dumps(content))

    def set_aside(self, job: str, step: int, reason: str) -> None:
        self.write(self.root / "checkpoints" / job / f"step-{step:012}.corrupt" / "reason.txt", reason)

    def stacks(self, job: str, name: str, text: str, seconds: int = 0) -> None:
        path = self.write(self.root / "logs" / job / f"stacks-attempt-{name}.txt", text)
        os.utime(path, (START + seconds, START + seconds))

    def token(self, job: str, attempt: int, uid: str = "u", created: int = 0) -> None:
        name = f"{int(START) + created:012}-{attempt:06}-{uid}"
        path = self.write(self.root / "checkpoints" / job / "attempts" / name, "")
        os.utime(path, (START + created + 10 * attempt, START + created + 10 * attempt))

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path.resolve())
