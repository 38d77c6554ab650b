"""What is done after the exception that ends a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ddp_trainer.rank import failures


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("module", "done"), [("torch.utils.data._utils.signal_handling", True), ("a_script_of_ones_own", False)]
)
def test_the_end_of_a_data_loader_worker_does_not_interrupt_what_follows_a_failure(
    module: str, done: bool, handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 71) is killed by signal: Terminated. ")

    def save(error: Exception) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        saved.append(error)

    raises.__module__ = module
    saved: list[Exception] = []
    monkeypatch.setattr(failures, "_actions", [save])
    signal.signal(signal.SIGCHLD, raises)
    failures.failed(ValueError("broken batch"))
    assert bool(saved) is done
