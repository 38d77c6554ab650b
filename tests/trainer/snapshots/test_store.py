"""A snapshot is there whole or not at all, and what is bad is refused, set aside and reported."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trainer.snapshots.conftest import manifest_of

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.snapshots.trust import store as store_module
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest, _checksum
from ddp_trainer.snapshots.trust.verify import sums


def flip_a_bit(step: Path) -> None:
    path = step / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(step: Path) -> None:
    os.truncate(step / "model.safetensors", 100)


def empty(step: Path) -> None:
    os.truncate(step / "model.safetensors", 0)


def lengthen(step: Path) -> None:
    with (step / "model.safetensors").open("ab") as file:
        file.write(b"x")


def lose_a_file(step: Path) -> None:
    (step / "model.safetensors").unlink()


def lose_the_manifest(step: Path) -> None:
    (step / "manifest.json").unlink()


def empty_the_manifest(step: Path) -> None:
    (step / "manifest.json").write_bytes(b"")


def garble_the_manifest(step: Path) -> None:
    (step / "manifest.json").write_bytes(b"\x00" * 4096)


def take_another_steps_manifest(step: Path) -> None:
    (step / "manifest.json").write_bytes((step.parent / "step-000000000001" / "manifest.json").read_bytes())


def link_a_file_to_elsewhere(step: Path) -> None:
    outside = step.parent.parent / "outside"
    (step / "model.safetensors").rename(outside)
    (step / "model.safetensors").symlink_to(outside)


def put_a_pipe_in_a_files_place(step: Path) -> None:
    (step / "model.safetensors").unlink()
    os.mkfifo(step / "model.safetensors")


def put_a_file_in_the_snapshots_place(step: Path) -> None:
    for path in step.iterdir():
        path.unlink()
    step.rmdir()
    step.write_text("not a directory")


DAMAGE = {
    flip_a_bit: "SHA-256",
    truncate: "100 bytes",
    empty: "0 bytes",
    lengthen: "4097 bytes",
    lose_a_file: "model.safetensors is missing",
    lose_the_manifest: "manifest.json is missing",
    empty_the_manifest: "not JSON",
    garble_the_manifest: "not JSON",
    take_another_steps_manifest: "manifest.json is of step 1",
    link_a_file_to_elsewhere: "symbolic link",
    put_a_pipe_in_a_files_place: "not a regular file",
    put_a_file_in_the_snapshots_place: "manifest.json is missing",
}


@pytest.mark.fault(37)
@pytest.mark.parametrize(("damage", "reason"), DAMAGE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_snapshot_is_refused_set_aside_and_the_one_before_used(volume: Any, damage: Any, reason: str) -> None:
    store = volume.writer()
    for step in (1, 2, 3):
        volume.save(store, step)
    damage(volume.step(3))

    newest = volume.writer(attempt=1).newest_valid()

    assert newest is not None
    assert newest.step == 2
    assert volume.names() == {volume.step(1).name, volume.step(2).name, volume.step(3).name + ".corrupt"}
    aside = volume.step(3).with_name(volume.step(3).name + ".corrupt")
    if aside.is_dir():
        assert reason in (aside / "reason.txt").read_text()


def test_a_manifest_that_could_not_be_read_again_is_no_snapshot(volume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = volume.writer()
    volume.save(store, 1)
    to_json = Manifest.to_json
    monkeypatch.setattr(Manifest, "to_json", lambda own: to_json(replace(own, samples=float(own.samples))))
    with pytest.raises(SnapshotError, match=r"samples is .*, not a whole number"):
        volume.save(store, 2)
    assert volume.names() == {volume.step(1).name}


def test_where_no_snapshot_verifies_there_is_none(volume: Any) -> None:
    store = volume.writer()
    for step in (1, 2):
        volume.save(store, step)
        truncate(volume.step(step))
    assert volume.writer(attempt=1).newest_valid() is None
    assert all(name.endswith(".corrupt") for name in volume.names())


def test_a_step_number_is_compared_as_a_number(volume: Any) -> None:
    store = volume.writer(keep=5)
    for step in (9, 10, 100):
        volume.save(store, step)
    assert store.steps() == [9, 10, 100]
    assert store.newest_valid().step == 100


def test_a_reader_changes_nothing(volume: Any) -> None:
    store = volume.writer()
    volume.save(store, 1)
    volume.save(store, 2)
    truncate(volume.step(2))
    (volume.directory / ".tmp-step-000000000003-0-1").mkdir()
    before = volume.names()
    assert volume.reader().newest_valid().step == 1
    assert volume.names() == before
    with pytest.raises(SnapshotError, match="opened for reading"):
        volume.save(volume.reader(), 3)


@pytest.mark.parametrize("removed", [FileNotFoundError, CorruptSnapshotError])
def test_a_reader_finds_what_a_job_saves_while_it_reads_what_that_removes(
    volume: Any, removed: type[Exception]
) -> None:
    store = volume.writer(keep=1)
    volume.save(store, 1)

    def read(directory: Path, manifest: Manifest) -> int:
        if manifest.step < 3:
            volume.save(store, manifest.step + 1)
            raise removed(f"{directory}: no such file")
        return manifest.step

    reader = volume.reader()
    assert reader.load_newest(read)[1] == 3
    assert reader.unreadable == []


def test_a_snapshot_of_a_later_format_stops_the_job_and_stays(volume: Any) -> None:
    volume.save(volume.writer(), 1)
    path = volume.step(1) / "manifest.json"
    value = json.loads(path.read_text()) | {"version": 2}
    value.pop("checksum")
    path.write_text(json.dumps({**value, "checksum": _checksum(value)}))
    with pytest.raises(IncompatibleSnapshotError, match="version 2") as caught:
        volume.writer(attempt=1).newest_valid()
    assert caught.value.exit_code == 64
    assert volume.names() == {volume.step(1).name}


def test_a_snapshot_that_cannot_be_read_just_now_is_passed_over_and_not_accused(volume: Any) -> None:
    store = volume.writer()
    volume.save(store, 1)
    volume.save(store, 2)

    def read(directory: Path, manifest: Manifest) -> int:
        if manifest.step == 2:
            raise OSError(errno.EIO, "Input/output error")
        return manifest.step

    assert store.load_newest(read)[1] == 1
    assert volume.step(2).name in volume.names()
    assert [info.step for info in store.unreadable] == [2]
    assert not store.set_aside


def test_where_no_snapshot_can_be_read_just_now_nothing_begins_anew(volume: Any) -> None:
    store = volume.writer()
    for step in (1, 2, 3):
        volume.save(store, step)
    truncate(volume.step(2))

    def read(directory: Path, manifest: Manifest) -> None:
        if manifest.step == 2:
            store.verify(2)
        raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(SnapshotError, match=r"step-0+3 \(.*Stale.*\), step-0+1 \(.*Stale.*\)\. .* left") as raised:
        volume.writer(attempt=1).load_newest(read)
    assert not isinstance(raised.value, UserError), "the next attempt may read them"
    assert volume.names() == {volume.step(1).name, volume.step(2).name + ".corrupt", volume.step(3).name}


def test_the_newest_are_kept(volume: Any) -> None:
    store = volume.writer(keep=2)
    for step in range(1, 6):
        volume.save(store, step)
    assert volume.names() == {volume.step(4).name, volume.step(5).name}


def test_what_was_just_saved_is_kept_even_below_a_step_that_could_not_be_read(volume: Any) -> None:
    volume.save(volume.writer(), 200)
    volume.save(volume.writer(keep=1), 150)
    assert volume.step(150).name in volume.names()


def test_old_set_aside_snapshots_do_not_pile_up(volume: Any) -> None:
    store = volume.writer(keep=2)
    for step in range(1, 8):
        volume.save(store, step)
        if step % 2:
            truncate(volume.step(step))
            store.newest_valid()
    volume.save(store, 8)
    assert sorted(name for name in volume.names() if name.endswith(".corrupt")) == [
        volume.step(5).name + ".corrupt",
        volume.step(7).name + ".corrupt",
    ]


def test_the_owner_clears_what_unfinished_saves_left(volume: Any) -> None:
    store = volume.writer()
    volume.save(store, 1)
    for name in (".tmp-step-000000000002-0-1", ".tmp-gone-step-000000000001-7"):
        (volume.directory / name).mkdir()
        (volume.directory / name / "model.safetensors").write_bytes(b"half")
    volume.writer(attempt=1).newest_valid()
    assert volume.names() == {volume.step(1).name}


@pytest.mark.parametrize("series", ["step", "checkpoint"])
def test_the_first_save_of_an_owner_that_loads_nothing_clears_that_too(volume: Any, series: Any) -> None:
    saved = volume.save(volume.writer(), 1)
    for name in (f".tmp-{series}-000000000002-0-1", f".tmp-gone-{series}-000000000001-7"):
        (volume.directory / name).mkdir()
        (volume.directory / name / "model.safetensors").write_bytes(b"half")
    fence = volume.writer(attempt=1).fence
    store = store_module.SnapshotStore(volume.directory, keep=3, fence=fence, series=series)
    if series == "step":
        volume.save(store, 2)
        assert volume.names() == {volume.step(1).name, volume.step(2).name}
    else:
        folder = store.begin(replace(saved, step=2))
        assert volume.names() == {volume.step(1).name, folder.name}


def test_a_step_saved_by_an_earlier_attempt_is_not_written_again(volume: Any) -> None:
    first = volume.save(volume.writer(attempt=0), 1)
    later = volume.writer(attempt=1)
    assert volume.save(later, 1) == first


def test_a_bad_snapshot_of_the_same_step_is_replaced(volume: Any) -> None:
    volume.save(volume.writer(attempt=0), 1)
    flip_a_bit(volume.step(1))
    store = volume.writer(attempt=1)
    assert volume.save(store, 1).attempt == 1
    assert store.verify(1).attempt == 1
    assert volume.step(1).name + ".corrupt" in volume.names()


# Order: what a power cut would leave


class RecordingDisk(Disk):
    """The real thing, keeping a list of what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []

    def create(self, path: Path, chunks: Any) -> FileEntry:
        self.calls.append(("create", path))
        return super().create(path, chunks)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink()))

    def fsync(self, path: Path) -> None:
        super().fsync(path)
        self.calls.append(("fsync", path))

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append(("rename", target))
        super().rename(source, target)


def test_all_is_on_the_disk_before_the_name_and_the_name_before_save_returns(volume: Any) -> None:
    disk = RecordingDisk()
    store = volume.writer(disk=disk)
    volume.save(store, 1)
    named = disk.calls.index(("rename", volume.step(1)))
    created = [path for call, path in disk.calls[:named] if call == "create"]
    for path in [*created, created[0].parent]:
        last_change = max(
            i for i, (_, other) in enumerate(disk.calls[:named]) if path in (other, other.parent) and _ == "create"
        )
        assert ("fsync", path) in disk.calls[last_change + 1 : named]
    assert created[-1].name == "manifest.json"
    assert disk.calls[named + 1 :] == [("fsync", volume.directory)]


class LostReplyDisk(Disk):
    """An NFS server that renamed, and whose reply was lost: asked again, it says that there is nothing to rename. It
    has made a folder, too, and says that there is one.
    """

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        super().make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        super().rename(source, target)


def test_a_rename_that_was_done_and_is_said_to_have_failed_is_a_snapshot(volume: Any) -> None:
    store = volume.writer(disk=LostReplyDisk())
    assert volume.save(store, 1).step == 1
    assert volume.names() == {volume.step(1).name}
    assert volume.reader().verify(1).step == 1
    store.abandon(folder := store.begin(manifest_of(2)))
    assert not folder.exists()


def test_a_folder_that_cannot_be_emptied_is_not_written_into(volume: Any) -> None:
    class Stubborn(Disk):
        """Removes nothing, and has a file in the folder that is made."""

        def make_directory(self, path: Path) -> None:
            path.mkdir()
            (path / "model.safetensors").touch()
            super().make_directory(path)

        def remove_tree(self, path: Path) -> None:
            pass

    with pytest.raises(SnapshotError, match="step 1 was not saved"):
        volume.save(volume.writer(disk=Stubborn()), 1)


def test_a_rename_that_was_not_done_is_not_taken_for_one_that_was(volume: Any) -> None:
    class Overtaken(Disk):
        """Gives the name to what another writer had for it, and clears away what this one has."""

        def rename(self, source: Path, target: Path) -> None:
            shutil.copytree(volume.step(1), target)
            shutil.rmtree(source)
            super().rename(source, target)

    volume.save(volume.writer(), 1)
    with pytest.raises(SnapshotError, match="step 2 was not saved"):
        volume.save(volume.writer(disk=Overtaken()), 2)


# What the volume acknowledged and lost


class ForgetfulDisk(Disk):
    """Has zeros in place of a file's bytes once it is closed, as a client that dropped what it still had to send."""

    def create(self, path: Path, chunks: Any) -> FileEntry:
        entry = super().create(path, chunks)
        if path.name == "model.safetensors":
            size = path.stat().st_size
            for length in (0, size):
                os.truncate(path, length)
        return entry


def test_a_manifest_is_of_the_bytes_that_were_to_be_written_and_not_of_what_is_left_of_them(volume: Any) -> None:
    volume.save(volume.writer(), 1)
    volume.save(volume.writer(disk=ForgetfulDisk()), 2)
    with pytest.raises(CorruptSnapshotError, match=r"model\.safetensors has SHA-256"):
        volume.reader().verify(2)
    assert volume.reader().newest_valid().step == 1


def test_each_file_is_synced_by_the_descriptor_that_wrote_it(volume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    store = volume.writer()
    monkeypatch.setattr(os, "fsync", noted)
    volume.save(store, 1)
    assert synced == ["model.safetensors", "manifest.json"]


def test_what_others_wrote_is_synced_by_a_descriptor_from_before_it_was_read(tmp_path: Path) -> None:
    class ReadDisk(Disk):
        def sync(self, descriptor: int) -> None:
            read.append(os.lseek(descriptor, 0, os.SEEK_CUR))
            super().sync(descriptor)

    read: list[int] = []
    (tmp_path / "model.pt").write_bytes(b"x" * 4096)
    assert sums(tmp_path, ["model.pt"], ReadDisk())["model.pt"].bytes == 4096
    assert read == [4096]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"model.safetensors": 2, "state.json": 0}, r"state\.json has 0 bytes, and 1 bytes were written to it"),
        ({"model.safetensors": 2}, r"state\.json is not there, and 1 bytes were written to it"),
        ({"model.safetensors": 2, "state.json": 1, "x": 5}, r"x has 5 bytes, and nothing was written to it"),
    ],
)
def test_a_snapshot_whose_files_are_not_those_that_were_written_is_not_saved(
    volume: Any, files: dict[str, int], problem: str
) -> None:
    def write(directory: Path) -> dict[str, FileEntry]:
        for name, size in files.items():
            (directory / name).write_bytes(bytes(size))
        return {"model.safetensors": FileEntry(2, "0" * 64), "state.json": FileEntry(1, "0" * 64)}

    store = volume.writer()
    with pytest.raises(SnapshotError, match=problem):
        store.save(write, Manifest("digits", "uid-1", 0, 1, 0, 0, 1, "ddp", 8, 1.0))
    assert volume.names() == set()


# Fencing


def test_a_fenced_writer_stops_before_it_writes_anything(volume: Any) -> None:
    older = volume.writer(attempt=0)
    volume.save(older, 1)
    newer = volume.writer(attempt=1)
    volume.save(newer, 2)
    before = volume.names()
    with pytest.raises(FencedError, match="attempt 1"):
        volume.save(older, 3)
    with pytest.raises(FencedError):
        older.newest_valid()
    assert volume.names() == before


def test_a_writer_fenced_before_it_clears_leaves_what_the_newer_one_writes(
    volume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off from the volume after it had looked whether it owns the directory."""
    older = volume.writer(attempt=0)
    clear = older._clear_once
    written = volume.directory / ".tmp-step-000000000002-1-1"

    def late() -> None:
        volume.writer(attempt=1)
        written.mkdir()
        clear()

    monkeypatch.setattr(older, "_clear_once", late)
    with pytest.raises(FencedError, match="attempt 1"):
        volume.save(older, 1)
    assert volume.names() == {written.name}


def test_a_writer_fenced_while_it_writes_leaves_the_newer_ones_files_alone(volume: Any) -> None:
    older = volume.writer(attempt=0, keep=1)
    volume.save(older, 1)

    def write(directory: Path) -> dict[str, FileEntry]:
        files = {"model.safetensors": older.disk.create(directory / "model.safetensors", [b"old"])}
        newer = volume.writer(attempt=1, keep=3)
        newer.newest_valid()
        volume.save(newer, 2)
        return files

    with pytest.raises(FencedError, match="attempt 1"):
        older.save(write, Manifest("digits", "uid-1", 0, 2, 0, 0, 1, "ddp", 8, 1.0))
    assert volume.names() == {volume.step(1).name, volume.step(2).name}
    assert volume.reader().verify(2).attempt == 1


def test_a_writer_fenced_when_all_is_written_does_not_give_it_a_name(volume: Any) -> None:
    older = volume.writer(attempt=0)

    def write(directory: Path) -> dict[str, FileEntry]:
        files = {"model.safetensors": older.disk.create(directory / "model.safetensors", [b"old"])}
        volume.writer(attempt=1)  # claims, and has not come to clearing up
        return files

    with pytest.raises(FencedError, match="attempt 1"):
        older.save(write, Manifest("digits", "uid-1", 0, 1, 0, 0, 1, "ddp", 8, 1.0))
    assert volume.names() == set()


# Faults of the disk


def failing(number: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("operation", ["create", "sync", "fsync", "rename", "make_directory"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_error_anywhere_leaves_the_old_snapshot_and_no_litter(volume: Any, operation: str, number: int) -> None:
    store = volume.writer()
    volume.save(store, 1)
    setattr(store.disk, operation, failing(number))
    with pytest.raises(SnapshotError, match=r"step 2 was not saved .* are intact and training goes on"):
        volume.save(store, 2)
    assert volume.reader().newest_valid().step == 1
    if operation != "fsync":
        assert volume.names() == {volume.step(1).name}


class Bucket(Disk):
    """A mounted bucket: gcsfuse and mountpoint-s3 refuse to rename a folder that is not empty, in different words."""

    def __init__(self, number: int) -> None:
        self.number = number

    def rename(self, source: Path, target: Path) -> None:
        raise OSError(self.number, os.strerror(self.number), str(source), None, str(target))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM, errno.ENOSYS])
def test_a_volume_that_renames_no_folder_is_said_to_be_none(volume: Any, number: int) -> None:
    with pytest.raises(SnapshotError, match=r"did not rename a folder \(.*\), as mounted buckets may not"):
        volume.save(volume.writer(disk=Bucket(number)), 1)
    assert volume.names() == set()


def test_where_the_last_snapshot_cannot_be_saved_nobody_is_promised_that_training_goes_on(volume: Any) -> None:
    store = volume.writer()
    last = replace(volume.save(store, 1), step=2, kind="final")
    store.disk.create = failing(errno.EIO)
    with pytest.raises(SnapshotError, match=r"step 2 was not saved .* are intact; ") as raised:
        store.save(lambda folder: {"model": store.disk.create(folder / "model", [b"2"])}, last, expected_bytes=1)
    assert "training goes on" not in str(raised.value)


@pytest.fixture
def unsized(volume: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The volume on a file system that does not say how large it is: FUSE without statfs."""
    nothing = os.statvfs_result((4096, 4096, *[0] * 7, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    return volume


def test_a_volume_without_a_size_is_not_full(unsized: Any) -> None:
    store = unsized.writer()
    unsized.save(store, 1)
    unsized.save(store, 2)
    assert unsized.reader().newest_valid().step == 2


def test_a_full_volume_without_a_size_is_named_without_what_is_free(unsized: Any) -> None:
    store = unsized.writer()
    store.disk.create = failing(errno.ENOSPC)
    with pytest.raises(SnapshotError, match=r"the volume is full \(1\.0 MiB needed\)\. "):
        unsized.save(store, 1)


def test_a_volume_that_is_full_of_files_is_named_with_its_inodes(volume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = volume.writer()
    few_inodes = os.statvfs_result((4096, 4096, *[8192] * 3, 24, 2, 2, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: few_inodes)
    store.disk.create = failing(errno.ENOSPC)
    with pytest.raises(SnapshotError, match=r"the volume is full \(32\.0 MiB and 2 inodes free, 1\.0 MiB needed\)\. "):
        volume.save(store, 1)


class HeldDisk(Disk):
    """A client of NFS on whose node a process has the snapshot of `held` open: its folder cannot be deleted."""

    def __init__(self, held: int | None, error: int) -> None:
        self.held = held
        self.error = error

    def remove_tree(self, path: Path) -> None:
        if self.held is not None and path.is_dir() and f"-{self.held:012d}" in path.name:
            (path / "model.safetensors").unlink(missing_ok=True)
            raise OSError(self.error, os.strerror(self.error), str(path))
        super().remove_tree(path)


@pytest.mark.parametrize("error", [errno.ENOTEMPTY, errno.EBUSY])
def test_a_snapshot_that_is_held_open_keeps_no_other_from_being_removed_and_goes_later(volume: Any, error: int) -> None:
    store = volume.writer(keep=9, disk=(disk := HeldDisk(1, error)))
    for step in (1, 2, 3):
        volume.save(store, step)
    store.keep = 1
    volume.save(store, 4)
    (left,) = volume.names() - {volume.step(4).name}
    assert left.startswith(f".tmp-gone-{volume.step(1).name}-")
    volume.save(store, 5)
    assert left in volume.names()
    disk.held = None
    volume.save(store, 6)
    assert volume.names() == {volume.step(6).name}


def test_what_a_removal_has_left_is_deleted_when_the_volume_is_full(volume: Any) -> None:
    class FullDisk(HeldDisk):
        def free_bytes(self, path: Path) -> int:
            return 0 if any(path.glob(".tmp-gone-*")) else 1 << 40

    store = volume.writer(keep=1, disk=(disk := FullDisk(1, errno.ENOTEMPTY)))
    for step in (1, 2):
        volume.save(store, step)
    disk.held = None
    volume.save(store, 3)
    assert volume.names() == {volume.step(3).name}


def test_a_step_that_is_removed_again_while_its_first_removal_is_held_goes_too(volume: Any) -> None:
    store = volume.writer(disk=(disk := HeldDisk(1, errno.EBUSY)))
    for _ in range(2):
        volume.save(store, 1)
        store.discard(1)
    assert len(volume.names()) == 2
    disk.held = None
    volume.save(store, 2)
    assert volume.names() == {volume.step(2).name}


def test_a_folder_that_is_held_open_keeps_nothing_beside_it_from_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def renamed_instead(path: Any, **given: Any) -> None:
        if path != "held":
            unlink(path, **given)

    monkeypatch.setattr(os, "unlink", renamed_instead)
    for name in ("a", "b", "c"):
        (tmp_path / "gone" / name).mkdir(parents=True)
        (tmp_path / "gone" / name / "weights").touch()
    for name in ("a", "b"):
        (tmp_path / "gone" / name / "held").touch()
    with pytest.raises(OSError, match="not empty") as raised:
        Disk().remove_tree(tmp_path / "gone")
    assert Path(raised.value.filename).name in {"a", "b"}
    left = {path.relative_to(tmp_path / "gone").as_posix() for path in (tmp_path / "gone").rglob("*")}
    assert left == {"a", "a/held", "b", "b/held"}


class LazyDisk(Disk):
    """Frees the space of what is removed when it has been asked for it a few times: CephFS, ZFS."""

    def __init__(self) -> None:
        self.is_full = False
        self.asked = 0

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        if "gone" in path.name:
            self.asked = 0

    def free_bytes(self, path: Path) -> int:
        self.asked += 1
        return (2 << 20 if self.asked > 4 else 0) if self.is_full else 1 << 40


def test_space_that_is_freed_some_time_after_a_removal_is_waited_for(
    volume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POLL_SECONDS", 0.001)
    disk = LazyDisk()
    store = volume.writer(keep=2, disk=disk)
    for step in (1, 2):
        volume.save(store, step)
    disk.is_full = True
    volume.save(store, 3)
    assert volume.names() == {volume.step(2).name, volume.step(3).name}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves on, and what was slept so far."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(store_module, "time", clock)
    return slept


class SmallDisk(Disk):
    """Has 1000 bytes left from `fill` on, and the space of each snapshot that is removed, at once or, but for `frees`,
    never.
    """

    def __init__(self, volume: Any, *, frees: bool = True) -> None:
        self.volume = volume
        self.frees = frees
        self.count: int | None = None

    def fill(self) -> None:
        self.count = len(list(self.volume.directory.glob("step-*")))

    def free_bytes(self, path: Path) -> int:
        if self.count is None:
            return 1 << 40
        removed = self.count - len(list(self.volume.directory.glob("step-*")))
        return 1000 + (removed << 16 if self.frees else 0)


def test_space_that_is_all_there_is_not_waited_for_though_it_is_too_little(volume: Any, waited: list[float]) -> None:
    store = volume.writer(keep=2, disk=(disk := SmallDisk(volume)))
    for step in (1, 2):
        volume.save(store, step)
    disk.fill()
    volume.save(store, 3)
    assert volume.names() == {volume.step(2).name, volume.step(3).name}
    assert waited == []


@pytest.mark.parametrize(("kind", "seconds"), [("periodic", 10), ("final", 10), ("preempted", 3), ("emergency", 3)])
def test_a_process_that_ends_waits_for_space_for_a_shorter_time(
    volume: Any, waited: list[float], kind: Any, seconds: int
) -> None:
    store = volume.writer(keep=2, disk=(disk := SmallDisk(volume, frees=False)))
    for step in (1, 2):
        saved = volume.save(store, step)
    disk.fill()
    store.save(
        lambda folder: {"model": disk.create(folder / "model", [b"3"])},
        replace(saved, step=3, kind=kind),
        expected_bytes=4096,
    )
    assert sum(waited) == pytest.approx(seconds, abs=0.5)


def test_a_volume_without_a_size_is_not_asked_for_space_again_and_again(unsized: Any, waited: list[float]) -> None:
    class FullDisk(Disk):
        def create(self, path: Path, chunks: Any) -> FileEntry:
            if len(list(unsized.directory.glob("step-*"))) >= 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path, chunks)

    store = unsized.writer(keep=2, disk=FullDisk())
    for step in (1, 2, 3):
        unsized.save(store, step)
    assert unsized.names() == {unsized.step(2).name, unsized.step(3).name}
    assert waited == []


def test_ranks_that_stand_still_until_a_checkpoint_is_begun_wait_for_no_space(volume: Any, waited: list[float]) -> None:
    store = volume.writer(keep=2, disk=(disk := SmallDisk(volume, frees=False)))
    for step in (1, 2):
        saved = volume.save(store, step)
    disk.fill()
    store.abandon(store.begin(replace(saved, step=3)))
    assert volume.names() == {volume.step(2).name}
    assert waited == []


def test_a_quota_that_does_not_show_in_what_is_free_is_met_by_removing_a_snapshot_first(
    volume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class QuotaDisk(Disk):
        def free_bytes(self, path: Path) -> int:
            return 1 << 40

        def create(self, path: Path, chunks: Any) -> FileEntry:
            if path.name == "model.safetensors" and len(list(volume.directory.glob("step-*"))) >= 2:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return super().create(path, chunks)

    monkeypatch.setattr(store_module, "ROOM_SECONDS", 0.01)
    store = volume.writer(keep=2, disk=QuotaDisk())
    for step in (1, 2, 3):
        volume.save(store, step)
    assert volume.names() == {volume.step(2).name, volume.step(3).name}
    store.keep = 9
    with pytest.raises(SnapshotError, match="volume is full"):
        volume.save(store, 4)
    assert volume.names() == {volume.step(2).name, volume.step(3).name}


def test_an_error_of_the_callers_own_leaves_no_litter(volume: Any) -> None:
    store = volume.writer()

    def write(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise RuntimeError("out of luck")

    with pytest.raises(SnapshotError, match="out of luck"):
        store.save(write, Manifest("digits", "uid-1", 0, 1, 0, 0, 1, "ddp", 8, 1.0))
    assert volume.names() == set()


def test_verify_of_one_step_names_what_is_wrong(volume: Any) -> None:
    store = volume.writer()
    volume.save(store, 1)
    assert store.verify(1).step == 1
    flip_a_bit(volume.step(1))
    with pytest.raises(CorruptSnapshotError, match=r"model\.safetensors has SHA-256"):
        store.verify(1)
    with pytest.raises(CorruptSnapshotError, match=r"manifest\.json is missing"):
        store.verify(2)


def test_list_separates_good_from_set_aside(volume: Any) -> None:
    store = volume.writer()
    for step in (1, 2, 3):
        volume.save(store, step)
    truncate(volume.step(3))
    store.newest_valid()
    newest, older, aside = volume.reader().list()
    assert (newest.step, older.step, aside.step) == (2, 1, 3)
    assert (newest.kind, newest.bytes, newest.problem) == ("periodic", 4096, None)
    assert "100 bytes" in aside.problem
    assert [info.step for info in store.set_aside] == [3]
