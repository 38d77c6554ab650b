"""Memory that CUDA pins for copies from the device, with CUDA's runtime replaced by a list of its calls."""

from __future__ import annotations

from weakref import ref

import pytest
import torch

from ddp_trainer.snapshots.codec import tensorfile
from ddp_trainer.snapshots.codec.state import Staging
from ddp_trainer.snapshots.codec.tensorfile import Memory


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(tensorfile, "_checked", lambda function, *arguments: made.append(function))
    monkeypatch.setattr(tensorfile, "_forget_error", lambda: made.append("the error is forgotten"))
    return made


def test_memory_is_unpinned_once_whether_it_is_released_or_dropped(calls: list[str]) -> None:
    dropped = Memory(5000, pinned=True)
    view = dropped.data[:10]
    del dropped
    assert calls == ["cudaHostRegister", "cudaHostUnregister"]
    assert view.fill_(3).sum() == 30
    calls.clear()
    released = Memory(5000, pinned=True)
    released.release()
    released.release()
    del released
    assert calls == ["cudaHostRegister", "cudaHostUnregister"]


def test_the_memory_of_a_state_that_has_changed_is_freed_before_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an optimizer that begins to train more of the model."""
    made: list[ref[Memory]] = []

    class Noted(Memory):
        def __init__(self, size: int, *, pinned: bool) -> None:
            assert not any(earlier() for earlier in made), "both are held at once"
            super().__init__(size, pinned=pinned)
            made.append(ref(self))

    monkeypatch.setattr(tensorfile, "Memory", Noted)
    staging = Staging()
    for size in (10, 20):
        staging.stage({"model": {"w": torch.zeros(size)}})
    assert len(made) == 2


def test_memory_that_cannot_be_pinned_holds_a_snapshot_all_the_same(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: str, *arguments: int) -> None:
        calls.append(function)
        raise RuntimeError("operation not supported (801)")

    monkeypatch.setattr(tensorfile, "_checked", refuse)
    memory = Memory(5000, pinned=True)
    assert torch.equal(memory.data.fill_(7), torch.full((5000,), 7, dtype=torch.uint8))
    assert "cannot be pinned" in caplog.text
    assert "operation not supported (801)" in caplog.text
    del memory
    assert calls == ["cudaHostRegister", "the error is forgotten"]
