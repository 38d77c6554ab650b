"""A job that begins anew finds no snapshot of an earlier one, and loses none of its own."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path

import pytest
from tests.trainer.snapshots.one_rank import Run

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.snapshots.session import Identity
from ddp_trainer.snapshots.trust import earlier
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.listing import listing, steps_in
from ddp_trainer.snapshots.trust.manifest import Manifest


def run(directory: Path, number: int, attempt: int = 0, *, anew: bool = True) -> Run:
    """A run of the job with this number; later ones are created later."""
    return Run(
        directory, identity=Identity("digits", f"uid-{number}", number, attempt, 0, 1, begins_anew=anew), keep=1000
    )


def saved(directory: Path, number: int, until: int) -> None:
    """A job that trains and ends."""
    of_job = run(directory, number)
    of_job.snapshots.resume()
    of_job.train(until)
    of_job.snapshots.close()


def aside(directory: Path) -> dict[str, list[int]]:
    """Steps by the job that set them aside."""
    return {path.name: list(steps_in(path)) for path in sorted((directory / "earlier").iterdir())}


def spoil(directory: Path) -> None:
    """Leave a manifest that cannot be read."""
    (directory / "manifest.json").write_text("{")


def test_a_new_job_begins_anew_and_its_restarts_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, until=4)
    second = run(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        assert second.snapshots.resume() is None
    assert "this job begins anew: snapshots of an earlier one (2) are now in" in caplog.text
    assert aside(tmp_path) == {"uid-2": [2, 4]}
    assert all(info.problem is None for info in listing(tmp_path / "earlier" / "uid-2")), "whole, and readable"
    second.train(2)
    second.snapshots.close()
    resumed = run(tmp_path, 2, attempt=1).snapshots.resume()
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (2, "uid-2")
    assert aside(tmp_path) == {"uid-2": [2, 4]}


def test_by_default_a_new_job_resumes(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=4)
    resumed = run(tmp_path, 2, anew=False).snapshots.resume()
    assert resumed is not None
    assert resumed.step == 4
    assert aside(tmp_path) == {"uid-1": []}


def test_one_run_back_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=2)
    saved(tmp_path, 2, until=4)
    assert run(tmp_path, 3).snapshots.resume() is None
    assert aside(tmp_path) == {"uid-3": [2, 4]}


class Holds(Disk):
    """A process of the node has a file of a folder open: a client of NFS keeps both."""

    def __init__(self, held: Path) -> None:
        self.held = held

    def remove_tree(self, path: Path) -> None:
        if path == self.held:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        super().remove_tree(path)


def test_a_folder_that_is_still_open_keeps_no_job_from_beginning_anew(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=2)
    saved(tmp_path, 2, until=4)
    fence = Fence.acquire(tmp_path, created=3, attempt=0, uid="uid-3")
    earlier.set_aside(tmp_path, fence, Holds(tmp_path / "earlier" / "uid-2"))
    assert aside(tmp_path) == {"uid-2": [2], "uid-3": [2, 4]}
    saved(tmp_path, 3, until=6)
    assert run(tmp_path, 4).snapshots.resume() is None
    assert aside(tmp_path) == {"uid-4": [2, 4, 6]}


def test_what_cannot_be_read_is_set_aside_too(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=4)
    spoil(tmp_path / "step-000000000004")
    assert run(tmp_path, 2).snapshots.resume() is None
    assert aside(tmp_path) == {"uid-2": [2, 4]}


def test_an_own_snapshot_that_went_bad_is_not_taken_for_an_earlier_job_s(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=4)
    saved(tmp_path, 2, until=4)
    spoil(tmp_path / "step-000000000004")
    restarted = run(tmp_path, 2, attempt=1)
    resumed = restarted.snapshots.resume()
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (2, "uid-2")
    assert (tmp_path / "step-000000000004.corrupt").exists(), "set aside as every snapshot that does not verify"
    assert aside(tmp_path) == {"uid-2": [2, 4]}
    assert all(info.problem is None for info in listing(tmp_path / "earlier" / "uid-2")), "those of the earlier job"


@pytest.mark.parametrize("first", [1, 2])
def test_an_own_snapshot_that_cannot_be_read_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Also where this job found nothing to set aside: then the name is free in `earlier/`."""
    for number in range(first, 3):
        saved(tmp_path, number, until=4)

    def read_manifest(directory: Path) -> Manifest:
        if directory == tmp_path / "step-000000000004":
            raise OSError(errno.EIO, "Input/output error")
        return read(directory)

    read = Manifest.read
    monkeypatch.setattr(Manifest, "read", read_manifest)
    resumed = run(tmp_path, 2, attempt=1).snapshots.resume()
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (2, "uid-2")
    monkeypatch.undo()
    resumed = run(tmp_path, 2, attempt=2).snapshots.resume()
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (4, "uid-2")


def test_what_comes_later_from_another_job_gets_a_name_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=2)
    shutil.copytree(tmp_path / "step-000000000002", tmp_path / "copy")
    assert run(tmp_path, 2).snapshots.resume() is None
    (tmp_path / "copy").rename(tmp_path / "step-000000000002")
    assert run(tmp_path, 2, attempt=1).snapshots.resume() is None
    names = sorted(path.name for path in (tmp_path / "earlier" / "uid-2").iterdir())
    assert names == ["step-000000000002", "step-000000000002.1"]


class Stops(Disk):
    """A process that dies after so many renames."""

    def __init__(self, renames: int) -> None:
        self.left = renames

    def rename(self, source: Path, target: Path) -> None:
        if self.left == 0:
            raise OSError("the process dies here")
        self.left -= 1
        super().rename(source, target)


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_crash_in_the_middle_loses_nothing(tmp_path: Path, renames: int) -> None:
    saved(tmp_path, 1, until=6)
    for step in steps_in(tmp_path):
        spoil(tmp_path / f"step-{step:012d}")
    fence = Fence.acquire(tmp_path, created=2, attempt=0, uid="uid-2")
    with pytest.raises(OSError, match="dies here"):
        earlier.set_aside(tmp_path, fence, Stops(renames))
    earlier.set_aside(tmp_path, Fence.acquire(tmp_path, created=2, attempt=1, uid="uid-2"))
    assert aside(tmp_path) == {"uid-2": [2, 4, 6]}
    assert steps_in(tmp_path) == []


def test_an_attempt_that_was_replaced_moves_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=2)
    old = Fence.acquire(tmp_path, created=2, attempt=0, uid="uid-2")
    Fence.acquire(tmp_path, created=3, attempt=0, uid="uid-3")
    with pytest.raises(FencedError):
        earlier.set_aside(tmp_path, old)
    assert steps_in(tmp_path) == [2]
