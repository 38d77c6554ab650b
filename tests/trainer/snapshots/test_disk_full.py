"""A full volume, for real: a small tmpfs. The old snapshot stays, the temporary goes, the message says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.starting import starts_processes
from tests.support.tmpfs import small_tmpfs

from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest

MIB = 1 << 20


@pytest.fixture
@starts_processes
def small(volume: Any, tmp_path: Path) -> Iterator[Any]:
    """The volume on a tmpfs of 16 MiB."""
    with small_tmpfs(volume.directory):
        yield volume


def test_a_snapshot_that_cannot_fit_is_refused_before_anything_is_written(small: Any) -> None:
    store = small.writer(keep=1)
    small.save(store, 1, b"a" * (9 * MIB))
    written = []
    with pytest.raises(
        SnapshotError, match=r"step 2 .* volume is full \(7\.0 MiB free, 10\.0 MiB needed\)\. .* intact .* enlarge"
    ):
        store.save(
            lambda directory: written.append(directory) or {},
            Manifest("d", "u", 0, 2, 0, 0, 1, "ddp", 8, 1.0),
            expected_bytes=9 * MIB,
        )
    assert written == []
    assert small.reader().newest_valid().step == 1


@pytest.mark.fault(34)
def test_running_full_in_the_middle_leaves_the_old_snapshot_and_removes_the_new(small: Any) -> None:
    store = small.writer(keep=1)
    small.save(store, 1, b"a" * (9 * MIB))

    def write(directory: Path) -> dict[str, FileEntry]:
        return {"model.safetensors": store.disk.create(directory / "model.safetensors", [b"b" * MIB] * 9)}

    with pytest.raises(SnapshotError, match="volume is full"):
        store.save(write, Manifest("d", "u", 0, 2, 0, 0, 1, "ddp", 8, 1.0), expected_bytes=1)
    assert small.names() == {small.step(1).name}
    assert small.reader().newest_valid().step == 1


def test_retention_runs_first_when_that_makes_room(small: Any) -> None:
    store = small.writer(keep=3)
    for step in (1, 2, 3):
        small.save(store, step, bytes([step]) * (4 * MIB))
    small.save(store, 4, b"d" * (4 * MIB))
    assert small.names() == {small.step(2).name, small.step(3).name, small.step(4).name}
    assert small.reader().newest_valid().step == 4


def test_running_full_in_the_middle_makes_room_and_tries_again(small: Any) -> None:
    store = small.writer(keep=3)
    for step in (1, 2, 3):
        small.save(store, step, bytes([step]) * (4 * MIB))

    def write(directory: Path) -> dict[str, FileEntry]:
        return {"model.safetensors": store.disk.create(directory / "model.safetensors", [b"d" * MIB] * 5)}

    store.save(write, Manifest("d", "u", 0, 4, 0, 0, 1, "ddp", 8, 1.0), expected_bytes=1)
    assert small.reader().newest_valid().step == 4
    assert not [name for name in small.names() if name.startswith(".tmp")]


def test_no_snapshot_is_given_up_for_room_while_the_newest_is_bad(small: Any) -> None:
    store = small.writer(keep=3)
    for step in (1, 2, 3):
        small.save(store, step, bytes([step]) * (4 * MIB))
    os.truncate(small.step(3) / "model.safetensors", 3 * MIB)
    with pytest.raises(SnapshotError, match="volume is full"):
        small.save(store, 4, b"d" * (8 * MIB))
    assert {small.step(1).name, small.step(2).name} <= small.names()


def test_a_full_volume_has_room_again_after_the_litter_of_a_dead_attempt_is_gone(small: Any) -> None:
    store = small.writer(attempt=0, keep=1)
    small.save(store, 1, b"a" * (4 * MIB))
    leftover = small.directory / ".tmp-step-000000000002-0-1"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"b" * (10 * MIB))
    later = small.writer(attempt=1, keep=1)
    assert later.newest_valid().step == 1
    small.save(later, 2, b"c" * (4 * MIB))
    assert small.names() == {small.step(2).name}


def fill(path: Path) -> None:
    """Write to it until the volume takes no more."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"b" * MIB)


def test_an_attempt_begins_on_a_volume_that_an_unfinished_save_has_filled_to_the_last_byte(small: Any) -> None:
    store = small.writer(attempt=0, keep=1)
    small.save(store, 1, b"a" * (4 * MIB))
    leftover = small.directory / ".tmp-step-000000000002-0-1"
    leftover.mkdir()
    with pytest.raises(OSError, match="No space left"):
        fill(leftover / "model.safetensors")
    later = small.writer(attempt=1, keep=1)
    assert later.newest_valid().step == 1
    small.save(later, 2, b"c" * (4 * MIB))
    assert small.names() == {small.step(2).name}
