"""Rolling back removes the snapshots that may hold what led to a loss that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.snapshots.unreadable import is_unreadable

from ddp_trainer.snapshots.trust import rollback


def test_a_request_that_cannot_be_read_now_is_carried_out_later(volume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = volume.writer()
    for step in (4, 6):
        volume.save(first, step)
    rollback.ask(first.fence, step=6)
    directory: Path = volume.directory

    with monkeypatch.context() as patched:
        is_unreadable(patched, directory / "rollbacks" / first.fence.own.name)
        with pytest.raises(OSError, match="Input/output error"):
            rollback.carry_out(directory, volume.writer(1).fence, keep=3)
    assert volume.reader().steps() == [4, 6]

    store = volume.writer(2)
    rollback.carry_out(directory, store.fence, keep=3)
    assert store.steps() == [4]
    assert rollback.asked(store.fence) == [6]


def test_a_request_that_a_crash_cut_short_removes_nothing_and_counts(volume: Any) -> None:
    store = volume.writer()
    volume.save(store, 4)
    rollback.ask(store.fence, step=4)
    (volume.directory / "rollbacks" / store.fence.own.name).write_bytes(b"")
    rollback.carry_out(volume.directory, volume.writer(1).fence, keep=3)
    assert store.steps() == [4]
    assert rollback.asked(store.fence) == [0]
