"""The newest attempt owns the directory, and an older one that is still alive stops."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.snapshots.trust.disk import Chunk, Disk
from ddp_trainer.snapshots.trust.fence import Fence, history
from ddp_trainer.snapshots.trust.manifest import FileEntry


def acquire(directory: Path, attempt: int, *, created: int = 1, uid: str = "uid-1") -> Fence:
    return Fence.acquire(directory, created=created, attempt=attempt, uid=uid)


def test_a_later_attempt_fences_the_one_before(tmp_path: Path) -> None:
    older = acquire(tmp_path, 0)
    older.check()
    acquire(tmp_path, 1)
    with pytest.raises(FencedError, match=r"attempt 0 \(uid uid-1\) is fenced: attempt 1 \(uid uid-1\) owns"):
        older.check()


def test_an_attempt_that_comes_late_cannot_claim(tmp_path: Path) -> None:
    acquire(tmp_path, 10)
    with pytest.raises(FencedError, match="attempt 10"):
        acquire(tmp_path, 9)
    assert len(history(tmp_path)) == 1


def test_a_job_created_later_under_the_same_name_owns_whatever_its_attempt(tmp_path: Path) -> None:
    old = acquire(tmp_path, 7, created=100, uid="old")
    acquire(tmp_path, 0, created=200, uid="new").check()
    with pytest.raises(FencedError, match="uid new"):
        old.check()


def test_without_an_operator_a_run_is_older_by_the_clock_and_the_message_says_so(tmp_path: Path) -> None:
    acquire(tmp_path, 0, created=1763704000, uid="local")
    with pytest.raises(FencedError, match="if it was set back, start the run again after 2025-11-21T05:46:40Z"):
        acquire(tmp_path, 0, created=1763703000, uid="local")
    for created, uid in ((1763704000, "local"), (1763705000, "other")):
        acquire(tmp_path, 1, created=created, uid=uid)
        with pytest.raises(FencedError) as fenced:
            acquire(tmp_path, 0, created=1763704000, uid="local")
        assert str(fenced.value).endswith("leaves every file to the newer one")


def test_a_restarted_container_claims_its_own_attempt_again(tmp_path: Path) -> None:
    first = acquire(tmp_path, 3)
    acquire(tmp_path, 3).check()
    first.check()
    assert len(history(tmp_path)) == 1


def test_a_newer_attempt_that_comes_between_the_check_and_the_token_fences_the_older(tmp_path: Path) -> None:
    class Overtaken(Disk):
        """Another pod creates the token of attempt 1 just before this one creates that of attempt 0."""

        def create(self, path: Path, chunks: Iterable[Chunk]) -> FileEntry:
            acquire(tmp_path, 1)
            return super().create(path, chunks)

    with pytest.raises(FencedError, match="attempt 1"):
        Fence.acquire(tmp_path, created=1, attempt=0, uid="uid-1", disk=Overtaken())


def test_of_many_that_claim_at_once_exactly_the_newest_is_left(tmp_path: Path) -> None:
    fences: list[Fence] = []
    start = threading.Barrier(16)

    def race(attempt: int) -> None:
        start.wait()
        try:
            fences.append(acquire(tmp_path, attempt))
        except FencedError:
            return

    threads = [threading.Thread(target=race, args=(attempt,)) for attempt in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = []
    for fence in fences:
        try:
            fence.check()
            owners.append(fence.own.attempt)
        except FencedError:
            pass
    assert owners == [15]


def test_the_claims_are_the_history_of_the_job(tmp_path: Path) -> None:
    acquire(tmp_path, 0)
    acquire(tmp_path, 1)
    first, second = history(tmp_path)
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.time is not None
    assert second.host


def test_a_claim_cut_short_by_a_crash_still_counts(tmp_path: Path) -> None:
    older = acquire(tmp_path, 0)
    (tmp_path / "attempts" / "000000000001-000001-uid-1").touch()
    (tmp_path / "attempts" / "not-a-claim").write_text("zzz")
    with pytest.raises(FencedError):
        older.check()
    assert [attempt.attempt for attempt in history(tmp_path)] == [0, 1]


class Full(Disk):
    """A volume that takes names, and no bytes."""

    def write(self, descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WithoutInodes(Disk):
    """One that takes no names either."""

    def create(self, path: Path, chunks: Iterable[Chunk]) -> FileEntry:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_attempt_on_a_full_volume_owns_it_by_its_name(tmp_path: Path) -> None:
    older = acquire(tmp_path, 0)
    Fence.acquire(tmp_path, created=1, attempt=1, uid="uid-1", disk=Full()).check()
    with pytest.raises(FencedError):
        older.check()
    assert [attempt.attempt for attempt in history(tmp_path)] == [0, 1]
    with pytest.raises(OSError, match="No space left"):
        Fence.acquire(tmp_path, created=1, attempt=2, uid="uid-1", disk=WithoutInodes())
    assert len(history(tmp_path)) == 2


def test_the_contract_names_and_fills_the_claim(tmp_path: Path) -> None:
    Fence.acquire(tmp_path, created=1763704000, attempt=2, uid="0b0c-1f", world_size=4, nodes=2)
    (path,) = (tmp_path / "attempts").iterdir()
    assert path.name == "001763704000-000002-0b0c-1f"
    details = json.loads(path.read_text())
    assert (details["worldSize"], details["nodes"]) == (4, 2)
    assert set(details) == {"time", "host", "worldSize", "nodes"}


@pytest.mark.parametrize("uid", ["../x", "a/b", "", ".hidden", "a\nb", "x" * 200])
def test_a_uid_that_is_no_file_name_is_refused(tmp_path: Path, uid: str) -> None:
    with pytest.raises(UserError, match="cannot name an attempt"):
        acquire(tmp_path, 0, uid=uid)


def test_claims_are_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "attempts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="symbolic link"):
        acquire(tmp_path, 0)
    assert list((tmp_path / "elsewhere").iterdir()) == []
