"""A program on one rank, in the process of the test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import ddp_trainer
from ddp_trainer.client.run import Run
from ddp_trainer.rank import failures


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Attach as the next attempt of a job on a volume of this test."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(failures, "_actions", [])
    monkeypatch.setattr(failures, "_replaced", [])
    # one that is told to stop would make this process end with 143, whatever its tests say
    monkeypatch.setattr(sys.modules[Run.__module__], "leave_as_preempted", lambda step: None)
    attempts = iter(range(9))

    def attached(*args: Any, **settings: Any) -> Run:
        environ = {
            "DDPJOB_SHARED": str(tmp_path / "shared"),
            "DDPJOB_RUN_DIR": str(tmp_path / "run"),
            "DDPJOB_NAME": "job",
            "DDPJOB_UID": "uid",
            "DDPJOB_CREATED": "1",
            "DDPJOB_ATTEMPT": str(next(attempts)),
            "DDPJOB_SNAPSHOT_EVERY": "2steps",
            "DDPJOB_SNAPSHOT_KEEP": "2",
        }
        attach = settings.pop("by", ddp_trainer.attach)
        return attach(*args, environ={**environ, **settings.pop("environ", {})}, **settings)

    yield attached
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
