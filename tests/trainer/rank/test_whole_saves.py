"""A rank that ends in the middle of `torch.save`, and what the path has then."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing.process
import os
import pickle
import shutil
import signal
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from tests.trainer.contract.one_rank import run_rank

from ddp_trainer.rank import whole_saves
from ddp_trainer.rank.whole_saves import save_whole_files

SAVES = """
import os, signal, sys, threading
import torch

class Signals:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # Python runs handlers between two of its instructions
        return int, ()

def handler(number, frame):
    print("handler:", signal.getsignal(signal.SIGTERM) is handler, flush=True)
    sys.exit(3)

def save(*_):
    torch.save({"first": torch.ones(3), "signals": Signals(), "last": torch.ones(3)}, PATH)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lines", "code", "printed"),
    [
        ("save()", -signal.SIGTERM, ""),
        ("signal.signal(signal.SIGTERM, handler); save()", 3, "handler: True\n"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); save(); print('after')", 0, "after\n"),
        ("torch.save(torch.ones(1), PATH); save()", -signal.SIGTERM, ""),
    ],
    ids=["default action", "handler of the script", "ignored", "a second save"],
)
def test_a_file_is_whole_where_sigterm_comes_while_it_is_written(
    lines: str, code: int, printed: str, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pt"
    ended = run_rank(f"PATH = {str(path)!r}\n{SAVES}\n{lines}\nprint('end')", tmp_path, has_torch=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.removesuffix("end\n") == printed
    assert torch.equal(torch.load(path, weights_only=False)["last"], torch.ones(3))


KILLED = """
import os, signal, threading
import torch

class Kills:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        return int, ()

torch.save(torch.ones(3), PATH)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "lines",
    [
        "torch.save([torch.zeros(3), Kills()], PATH)",
        "threading.Thread(target=torch.save, args=[[torch.zeros(3), Kills()], PATH]).start(); signal.pause()",
    ],
    ids=["main thread", "another thread"],
)
def test_a_rank_killed_while_it_saves_leaves_the_old_file_and_the_next_one_clears_up(
    lines: str, tmp_path: Path
) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    path = saves / "snapshot.pt"
    ended = run_rank(f"PATH = {str(path)!r}\n{KILLED}\n{lines}", tmp_path, has_torch=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert torch.equal(torch.load(path), torch.ones(3))
    (left,) = set(saves.iterdir()) - {path}
    assert left.name.startswith(".ddpjob-saving-training-rank0-")
    ended = run_rank(f"import torch; torch.save(torch.zeros(3), {str(path)!r})", tmp_path, has_torch=True)
    assert ended.returncode == 0, ended.stderr
    assert list(saves.iterdir()) == [path]
    assert torch.equal(torch.load(path), torch.zeros(3))


@pytest.mark.processes
def test_a_file_that_is_written_from_memory_as_ultralytics_does_is_replaced_as_a_whole(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    path = saves / "last.pt"
    lines = """
import io, os, resource, signal
from pathlib import Path
import torch
for values in (torch.ones(3), torch.zeros(1 << 20)):
    buffer = io.BytesIO()
    torch.save(values, buffer)
    if len(values) > 3:  # the kernel ends the rank in the middle of the file
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    Path(PATH).write_bytes(buffer.getvalue())
"""
    ended = run_rank(f"PATH = {str(path)!r}\n{lines}", tmp_path, has_torch=True)
    assert ended.returncode == -signal.SIGXFSZ, ended.stderr
    assert torch.equal(torch.load(path), torch.ones(3))


COMPOSER = """
import torch

def _write_checkpoint_file(state_dict, filename):
    with open(filename, "wb") as f:
        torch.save(state_dict, f)
"""


@pytest.mark.processes
def test_a_rank_killed_while_composer_saves_leaves_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """It opens the file itself, and refuses to train where one of a later step lies in its folder."""
    package = tmp_path / "composer/utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "checkpoint.py").write_text(COMPOSER)
    saves = tmp_path / "saves"
    saves.mkdir()
    first, second = saves / "ep0-ba1-rank0.pt", saves / "ep0-ba2-rank0.pt"
    composer = f"import torch\nfrom composer.utils import checkpoint\nPATH, SECOND = {str(first)!r}, {str(second)!r}\n"
    save = "checkpoint._write_checkpoint_file(state_dict={}, filename=SECOND)"
    ended = run_rank(f"{composer}{KILLED}\n{save.format('[torch.zeros(3), Kills()]')}", tmp_path, has_torch=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert first.exists()
    assert not second.exists()
    ended = run_rank(f"{composer}{save.format('torch.ones(3)')}", tmp_path, has_torch=True)
    assert ended.returncode == 0, ended.stderr
    assert sorted(saves.iterdir()) == [first, second]
    assert torch.equal(torch.load(second), torch.ones(3))


LOOKS = """
from pathlib import Path
print(sorted(str(path.relative_to(FOLDER)) for path in Path(FOLDER).rglob("*.pt")), flush=True)
"""


@pytest.mark.processes
def test_a_script_that_looks_in_all_folders_finds_no_file_of_a_save_that_was_cut_short(tmp_path: Path) -> None:
    """It looks before it saves for the first time, and before it imports torch."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    shared = {"DDPJOB_SHARED": str(tmp_path / "shared"), "DDPJOB_UID": "1-2"}
    killed = f"PATH = {str(folder / 'step_1.pt')!r}\n{KILLED}\ntorch.save(Kills(), {str(folder / 'step_2.pt')!r})"
    ended = run_rank(killed, tmp_path, has_torch=True, DDPJOB_ATTEMPT="0", **shared)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(list(folder.rglob("*.pt"))) == 2
    ended = run_rank(f"FOLDER = {str(folder)!r}\n{LOOKS}", tmp_path, DDPJOB_ATTEMPT="1", **shared)
    assert (ended.returncode, ended.stdout) == (0, "['step_1.pt']\n"), ended.stderr
    assert list(folder.iterdir()) == [folder / "step_1.pt"]
    assert list((tmp_path / "shared/logs/training/saving").iterdir()) == []


TRANSACTION = """
import os, shutil, signal, tempfile
from pathlib import Path
import fsspec

tempfile.tempdir = TEMPORARY

def save(content):
    files = fsspec.filesystem("file")
    with files.transaction, files.open(PATH, "wb") as file:
        file.write(content)

def dies(source, target, **_):
    Path(target).write_bytes(b"ha")
    os.kill(os.getpid(), signal.SIGKILL)

save(b"whole")
"""


@pytest.mark.processes
def test_a_rank_killed_while_lightning_copies_a_checkpoint_to_its_place_leaves_the_old_one(tmp_path: Path) -> None:
    """Lightning saves so; the folder for temporary files is on another file system than the volume."""
    saves = tmp_path / "saves"
    saves.mkdir()
    path = saves / "last.ckpt"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        if Path(temporary).stat().st_dev == saves.stat().st_dev:
            pytest.skip("one file system has both")
        script = f"PATH, TEMPORARY = {str(path)!r}, {temporary!r}\n{TRANSACTION}"
        ended = run_rank(f"{script}\nshutil.copyfile = dies\nsave(b'of the next epoch')", tmp_path)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert path.read_bytes() == b"whole"
        ended = run_rank(f"{script}\nsave(b'of the next epoch')", tmp_path)
        assert (ended.returncode, path.read_bytes()) == (0, b"of the next epoch"), ended.stderr
        assert list(saves.iterdir()) == [path]
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444
        assert len(list(Path(temporary).iterdir())) == 1, "what the rank left that was killed"


def before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what `save_whole_files` changes in this process taken back at the end of a test."""
    process = multiprocessing.process.BaseProcess
    changed = ((torch.serialization, "save"), (torch, "save"), (LocalFileOpener, "commit"), (process, "start"))
    for place, name in (*changed, (Path, "write_bytes")):
        monkeypatch.setattr(place, name, getattr(place, name))


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object, Any], None]]:
    """`torch.save` as a script of a rank has it, in this process."""
    before(monkeypatch)
    save_whole_files("train-rank0")
    return torch.save


def test_a_script_does_not_find_in_its_folder_what_a_killed_save_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch)
    monkeypatch.chdir(tmp_path)
    other = tmp_path / ".ddpjob-saving-train-rank1-1234abcdqwertz_0"
    for left in (other, tmp_path / ".ddpjob-saving-train-rank0-1234abcdqwertz_0"):
        left.mkdir()
        (left / "snapshot.pt").touch()
    save_whole_files("train-rank0")
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    ("attempt", "line", "is_removed"),
    [
        ("uid-1", '{"folder": "FOLDER", "prefix": ".ddpjob-saving-train-rank1-1234abcd"}', True),
        ("uid-1", '{"folder\\n{"folder": "FOLDER", "prefix": ".ddpjob-saving-train-rank1-1234abcd"}', True),
        ("uid-2", '{"folder": "FOLDER", "prefix": ".ddpjob-saving-train-rank1-1234abcd"}', False),
        ("uid-1", '{"folder": "FOLDER", "prefix": ".ddpjob-saving-train-rank1-1234abce"}', False),
        ("uid-1", '{"folder": "FOLDER/..", "prefix": "*"}', False),
        ("uid-1", "[]", False),
    ],
    ids=["earlier", "after a line that was cut short", "of this attempt", "of another process", "no prefix", "no note"],
)
def test_only_what_an_earlier_attempt_was_writing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, line: str, is_removed: bool
) -> None:
    before(monkeypatch)
    monkeypatch.chdir(tmp_path)
    left, notes = tmp_path / "saves/.ddpjob-saving-train-rank1-1234abcdqwertz_0", tmp_path / "notes"
    for folder in (left, notes):
        folder.mkdir(parents=True)
    (left / "snapshot.pt").touch()
    note = notes / f"{attempt}-1234abcd.jsonl"
    note.write_text(line.replace("FOLDER", str(left.parent)).replace("\\n", "\n") + "\n")
    save_whole_files("train-rank0", notes=notes, attempt="uid-2")
    assert left.exists() != is_removed
    assert note.exists() == (attempt == "uid-2")


@pytest.mark.parametrize(
    ("attempt", "is_removed"),
    [("u-1-9", True), ("u-1-10", False), ("u-1-11", False), ("u-2-11", True), ("u-11", True)],
    ids=["before", "the same", "after", "of another run", "of a run with a similar name"],
)
def test_a_rank_that_begins_late_leaves_what_a_later_attempt_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str, is_removed: bool
) -> None:
    before(monkeypatch)
    left, notes = tmp_path / "saves/.ddpjob-saving-train-rank1-1234abcdqwertz_0", tmp_path / "notes"
    for folder in (left, notes):
        folder.mkdir(parents=True)
    note = notes / f"{attempt}-1234abcd.jsonl"
    note.write_text(json.dumps({"folder": str(left.parent), "prefix": left.name[:-8]}) + "\n")
    save_whole_files("train-rank0", notes=notes, attempt="u-1-10")
    assert (left.exists(), note.exists()) == (not is_removed, not is_removed)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_note_stays_until_nothing_is_left_of_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """A rank may still have it to do: one that may remove it, or that has the folder in its pod."""
    before(monkeypatch)
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "saves/.ddpjob-saving-train-rank1-1234abcdqwertz_0").mkdir(parents=True)
    folders = {"gone": tmp_path / "gone", "left": tmp_path / "saves", "elsewhere": Path("/dev/shm/ddpjob-no-such")}
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("one file system has both")
    for name, folder in folders.items():
        note = notes / f"uid-1-{name}.jsonl"
        note.write_text(json.dumps({"folder": str(folder), "prefix": ".ddpjob-saving-train-rank1-1234abcd"}) + "\n")
        if is_old:
            os.utime(note, (1e9, 1e9))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # of another user, or open over NFS
    save_whole_files("train-rank0", notes=notes, attempt="uid-2")
    kept = set() if is_old else {"uid-1-left.jsonl", "uid-1-elsewhere.jsonl"}
    assert {note.name for note in notes.iterdir()} == kept


def test_a_note_has_the_newest_of_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch)
    monkeypatch.setattr(whole_saves, "_MOST_NOTED", 3)
    save_whole_files("train-rank0", notes=tmp_path / "notes", attempt="uid-0")
    for step in range(9):
        (tmp_path / f"step-{step}").mkdir()
        torch.save(torch.ones(3), tmp_path / f"step-{step}/1.pt")
    (note,) = (tmp_path / "notes").iterdir()
    noted = [Path(json.loads(line)["folder"]).name for line in note.read_text().splitlines()]
    assert noted == ["step-6", "step-7", "step-8"]


def test_a_folder_is_noted_once_and_one_that_cannot_be_noted_is_saved_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch)
    save_whole_files("train-rank0", notes=tmp_path / "notes", attempt="uid-0")
    for name in ("1.pt", "2.pt"):
        torch.save(torch.ones(3), tmp_path / name)
    (note,) = (tmp_path / "notes").iterdir()
    assert len(note.read_text().splitlines()) == 1
    note.unlink()
    note.mkdir()
    (tmp_path / "other").mkdir()
    torch.save(torch.ones(3), tmp_path / "other/1.pt")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["1.pt"]


def test_a_process_that_a_rank_spawns_saves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch)
    plain, started = torch.save, []
    path = tmp_path / "snapshot.pt"
    torch.save(torch.ones(3), path)
    was = path.stat().st_ino
    process = multiprocessing.process.BaseProcess
    monkeypatch.setattr(process, "start", lambda self: started.append(pickle.dumps(self._target)))
    save_whole_files("train-rank0")
    multiprocessing.get_context("spawn").Process(target=torch.save).start()
    for place in (torch, torch.serialization):  # as they are in the new process
        monkeypatch.setattr(place, "save", plain)
    target = pickle.loads(started[0])
    target(torch.zeros(3), io.BytesIO())
    torch.save(torch.zeros(3), path)
    assert path.stat().st_ino != was
    target(torch.zeros(3), io.BytesIO())
    assert torch.save.__wrapped__ is plain, "once, however often it is asked for"


def test_a_save_that_fails_leaves_the_old_file(save: Callable[[object, Any], None], tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    with pytest.raises(AttributeError, match="local object"):
        save([torch.zeros(3), lambda: None], path)
    assert torch.equal(torch.load(path), torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_bytes_and_the_mode_that_it_would_have(
    save: Callable[[object, Any], None], tmp_path: Path
) -> None:
    plain, path = tmp_path / "plain" / "snapshot.pt", tmp_path / "snapshot.pt"
    plain.parent.mkdir()
    save.__wrapped__(torch.ones(3), plain)  # type: ignore[attr-defined]
    save(torch.ones(3), path)
    assert path.read_bytes() == plain.read_bytes(), "its records begin with the name of the file"
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    save(torch.zeros(3), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("code", "is_replaced"), [(None, True), (errno.EINVAL, True), (errno.ENOSPC, False), (errno.EDQUOT, False)]
)
def test_the_bytes_are_on_the_disk_before_the_old_file_goes(
    save: Callable[[object, Any], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int | None,
    is_replaced: bool,
) -> None:
    path, synced = tmp_path / "snapshot.pt", []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        if code is not None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    save(torch.ones(3), path)
    assert synced == [], "many small new files are not to wait each"
    was = path.stat().st_ino
    save(torch.zeros(3), path)
    assert torch.equal(torch.load(path), torch.zeros(3))
    assert (path.stat().st_ino == synced[0], path.stat().st_ino != was) == (is_replaced, is_replaced)


def test_an_old_file_stays_where_the_disk_fails(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        save(torch.zeros(3), path)
    assert torch.equal(torch.load(path), torch.ones(3))


def test_links_stay_links(save: Callable[[object, Any], None], tmp_path: Path) -> None:
    path, link, second = tmp_path / "1.pt", tmp_path / "latest.pt", tmp_path / "2.pt"
    save(torch.ones(3), path)
    link.symlink_to(path.name)
    save(torch.zeros(3), link)
    assert link.is_symlink()
    assert torch.equal(torch.load(path), torch.zeros(3))
    second.hardlink_to(path)
    save(torch.ones(3), path)
    assert torch.equal(torch.load(second), torch.ones(3))


def test_what_is_no_file_to_replace_is_written_as_torch_writes_it(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    save(torch.ones(3), buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue())), torch.ones(3))
    save(torch.ones(3), os.devnull)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(RuntimeError, match=r"Parent directory .* does not exist"):
        save(torch.ones(3), tmp_path / "none" / "snapshot.pt")
    with pytest.raises(RuntimeError, match=r"invalid file name|does not exist"):
        save(torch.ones(3), f"{tmp_path}/none/")
    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    was = path.stat().st_ino
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, free=0))
    save(torch.zeros(3), path)
    assert path.stat().st_ino == was, "there is no room for two"
    assert torch.equal(torch.load(path), torch.zeros(3))


def test_what_the_script_has_open_is_written_into(save: Callable[[object, Any], None], tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".pt") as file:
        save(torch.ones(3), file.name)
        assert torch.equal(torch.load(io.BytesIO(file.read())), torch.ones(3))
    memory = os.memfd_create("weights")
    save(torch.ones(3), f"/proc/self/fd/{memory}")
    with os.fdopen(memory, "rb") as written:
        assert torch.equal(torch.load(io.BytesIO(written.read())), torch.ones(3))


def test_files_in_memory_are_not_there_twice(save: Callable[[object, Any], None]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ddpjob-saves-") as folder:
        path = Path(folder) / "weights.pt"
        save(torch.ones(3), path)
        was = path.stat().st_ino
        save(torch.zeros(3), path)
        assert path.stat().st_ino == was
        assert torch.equal(torch.load(path), torch.zeros(3))


def test_a_file_that_cannot_be_replaced_is_written_in_place(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tried = tmp_path / "snapshot.pt", []

    def replace(self: Path, target: Path) -> None:
        tried.append(target)
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", replace)
    for value in (torch.ones(3), torch.zeros(3)):
        save(value, path)
        assert torch.equal(torch.load(path), value)
        assert list(tmp_path.iterdir()) == [path]
    assert tried == [path], "once a folder"


def test_a_file_is_replaced_where_the_volume_gives_all_files_to_one_user(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    was = path.stat().st_ino
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    save(torch.zeros(3), path)
    assert path.stat().st_ino != was


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("user", "group"), [(12345, -1), (-1, 12345)])
def test_a_file_keeps_its_owner_and_its_group(
    save: Callable[[object, Any], None], tmp_path: Path, user: int, group: int
) -> None:
    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    os.chown(path, user, group)
    was = path.stat()
    save(torch.zeros(3), path)
    assert torch.equal(torch.load(path), torch.zeros(3))
    assert (path.stat().st_uid, path.stat().st_gid) == (was.st_uid, was.st_gid)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_makes_way_for_the_new_one_where_both_do_not_fit(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "snapshot.pt"

    class Large:
        def __reduce__(self) -> tuple[type[int], tuple[()]]:
            if any(tmp_path.glob(".ddpjob-saving-*")):
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
            return int, ()

    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        save([torch.zeros(3), Large()], path)
    assert list(tmp_path.iterdir()) == [], "there is no other file to make way"
    save(torch.ones(3), path)
    save([torch.zeros(3), Large()], path)
    assert torch.equal(torch.load(path, weights_only=False)[0], torch.zeros(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("files", "is_replaced"), [(1, True), (4, False)])
def test_ranks_that_all_save_need_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, is_replaced: bool
) -> None:
    before(monkeypatch)
    save_whole_files("train-rank1", files)
    path = tmp_path / "snapshot.pt"
    torch.save(torch.ones(3), path)
    was = path.stat()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, free=was.st_size * 3))
    torch.save(torch.zeros(3), path)
    assert (path.stat().st_ino != was.st_ino) == is_replaced


def test_a_file_system_that_knows_no_modes_and_no_free_space_is_written_to(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "snapshot.pt"
    save(torch.ones(3), path)
    was = path.stat().st_ino
    with monkeypatch.context() as refused:
        refused.setattr(os, "chmod", refuse)
        refused.setattr(os, "statvfs", refuse)
        save(torch.zeros(3), path)
    assert path.stat().st_ino != was
    path.chmod(0o640)
    with monkeypatch.context() as refused:
        refused.setattr(os, "chmod", refuse)
        save(torch.ones(3), path)
    assert torch.equal(torch.load(path), torch.ones(3))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_saves_at_the_same_time_leave_each_other_alone(
    save: Callable[[object, Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saving, may_end = threading.Event(), threading.Event()
    other, find, ended = tmp_path / "other.pt", Path.glob, []

    class Slow:
        def __reduce__(self) -> tuple[type[int], tuple[()]]:
            is_saving.set()
            may_end.wait()
            return int, ()

    def save_slowly() -> None:
        save([torch.zeros(3), Slow()], other)
        ended.append(other)

    thread = threading.Thread(target=save_slowly)

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        monkeypatch.setattr(Path, "glob", find)
        thread.start()
        is_saving.wait()
        return find(self, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    save(torch.ones(3), tmp_path / "snapshot.pt")
    may_end.set()
    thread.join()
    assert ended == [other]
    assert torch.equal(torch.load(other, weights_only=False)[0], torch.zeros(3))


def test_a_compiled_function_saves_without_a_warning(save: Callable[[object, Any], None], tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        save(x * 2, tmp_path / "snapshot.pt")
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(torch.compile(step, backend="eager")(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(torch.load(tmp_path / "snapshot.pt"), torch.full((3,), 2.0))


def test_an_attempt_whose_place_is_taken_does_not_write_into_the_next_ones_file(
    save: Callable[[object, Any], None], tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pt"

    class Cleared:
        def __reduce__(self) -> tuple[type[int], tuple[()]]:
            for folder in tmp_path.glob(".ddpjob-saving-*"):
                shutil.rmtree(folder)
            return int, ()

    save(torch.ones(3), path)
    with pytest.raises(FileNotFoundError):
        save([torch.zeros(3), Cleared()], path)
    assert torch.equal(torch.load(path), torch.ones(3))


def test_a_path_that_opens_files_in_its_own_way_does_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3Path does."""
    before(monkeypatch)

    class Remote(type(Path())):  # type: ignore[misc]
        def open(self, *_args: Any, **_settings: Any) -> Any:
            return (tmp_path / "sent").open("wb")

    save_whole_files("train-rank0")
    (tmp_path / "here").mkdir()
    assert Remote(tmp_path, "here", "last.pt").write_bytes(b"PK\x03\x04x") == 5
    assert (tmp_path / "sent").exists()
    assert not list((tmp_path / "here").iterdir())
    assert (tmp_path / "none").write_bytes(memoryview(np.zeros((0, 3)))) == 0
