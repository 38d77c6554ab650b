"""A person has the next attempt begin from an older snapshot, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.snapshots.one_rank import Run
from tests.trainer.snapshots.test_earlier import Stops, saved
from tests.trainer.snapshots.test_earlier import run as job_of
from tests.trainer.snapshots.unreadable import is_unreadable

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.snapshots.__main__ import main
from ddp_trainer.snapshots.checkpoints import Checkpoints
from ddp_trainer.snapshots.trust import restore
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.listing import manifest_in, steps_in
from ddp_trainer.snapshots.trust.rollback import ask, asked
from ddp_trainer.snapshots.values import Identity, Progress


def resumed(directory: Path, attempt: int, until: int = 0) -> int | None:
    """The step that an attempt resumes from; it trains until another one."""
    run = Run(directory, attempt=attempt, keep=1000)
    found = run.snapshots.resume()
    run.train(until)
    run.snapshots.close()
    return found.step if found else None


def checkpoint(directory: Path, *, attempt: int, step: int) -> None:
    """One that the program saves itself."""
    checkpoints = Checkpoints(directory, keep=9, identity=Identity("digits", "uid-1", 1, attempt, 0, 1))
    with checkpoints.writing(Progress(step, 0, 0)) as folder:
        (folder / "model.pt").write_bytes(b"model")


def aside(directory: Path) -> list[str]:
    return [path.name[-2:] for path in restore.aside_in(directory)]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Its first attempt has saved the steps 2, 4 and 6."""
    assert resumed(tmp_path, 0, until=6) is None
    return tmp_path


def test_the_next_attempt_begins_from_it_and_later_ones_from_what_it_saves(
    job: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["restore", str(job), "--step", "2"]) == 0
    newer = "step-000000000004, step-000000000006"
    assert capsys.readouterr().out == f"step 2: verified; the next attempt begins from it, and sets aside {newer}\n"
    assert steps_in(job) == [2, 4, 6], "it is for an attempt that owns the directory to move them"
    assert main(["ls", str(job)]) == 0
    assert "the next attempt is asked to begin from step 2\n" in capsys.readouterr().out

    assert resumed(job, 1, until=4) == 2
    assert f"2 newer ones are now in {job}/aside/000000000001-000001-uid-1" in caplog.text
    assert (steps_in(job), aside(job)) == ([2, 4], ["06", "04"])
    assert main(["ls", str(job)]) == 0
    assert "step          6  set aside by a restore, aside/000000000001-000001-uid-1\n" in capsys.readouterr().out
    assert resumed(job, 2) == 4


def test_a_snapshot_that_was_set_aside_can_be_restored_and_only_rm_removes_it(job: Path) -> None:
    restore.ask(job, 2)
    assert resumed(job, 1) == 2
    restore.ask(job, 6)
    assert resumed(job, 2) == 6
    assert (steps_in(job), aside(job)) == ([2, 6], ["04"])
    assert main(["rm", str(job), "--step", "4"]) == 0
    assert (steps_in(job), aside(job)) == ([2, 6], [])


@pytest.mark.parametrize("step", [4, 5])
def test_a_snapshot_that_is_not_there_or_damaged_is_refused(
    job: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(job / "step-000000000004" / "state.json", 3)
    assert main(["restore", str(job), "--step", str(step)]) == 1
    assert capsys.readouterr().err.startswith(
        "step-000000000004 is not restored, it does not verify: state.json has 3 bytes"
        if step == 4
        else "there is no snapshot of step 5"
    )
    assert restore.asked(job) is None
    assert resumed(job, 1) == 6


def test_what_an_attempt_on_a_lost_node_saves_meanwhile_is_set_aside_too(job: Path) -> None:
    lost = Run(job, attempt=1, keep=1000)
    lost.snapshots.resume()
    restore.ask(job, 2)
    lost.train(8)
    lost.snapshots.close()
    assert resumed(job, 2) == 2
    assert aside(job) == ["08", "06", "04"]


def test_an_attempt_that_began_before_the_request_leaves_it_to_the_next_one(job: Path) -> None:
    """Such as one on a lost node, which acquires the directory again for the first checkpoint of its program."""
    assert resumed(job, 1, until=8) == 6
    restore.ask(job, 2)
    checkpoint(job, attempt=1, step=9)
    assert (steps_in(job), aside(job)) == ([2, 4, 6, 8], [])
    assert resumed(job, 2) == 2
    assert aside(job) == ["08", "06", "04", "09"]


def test_an_attempt_with_the_token_of_the_one_before_says_that_it_restores_nothing(
    job: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as where a person sets DDPJOB_CREATED and DDPJOB_ATTEMPT, to the same numbers each time."""
    restore.ask(job, 2)
    assert resumed(job, 0) == 6
    assert "step 2 is not restored by this attempt, which began before that was asked for" in caplog.text
    assert resumed(job, 1) == 2


def test_steps_that_were_trained_since_the_request_are_not_set_aside(job: Path) -> None:
    """Such as by a job that was unsuspended at the same time, whose attempt has read the directory before."""
    restore.ask(job, 2)
    request = (job / restore.REQUEST).read_bytes()
    (job / restore.REQUEST).unlink()
    assert resumed(job, 1, until=8) == 6
    (job / restore.REQUEST).write_bytes(request)
    assert resumed(job, 2) == 8
    assert restore.asked(job) is None
    assert aside(job) == []


def test_without_an_operator_a_restore_is_carried_out_too(tmp_path: Path) -> None:
    """All attempts have the same uid and number there, and each a creation time of its own."""

    def as_without(created: int, until: int) -> int | None:
        run = Run(tmp_path, keep=1000, identity=Identity("digits", "local", created, 0, 0, 1))
        found = run.snapshots.resume()
        run.train(until)
        run.snapshots.close()
        return found.step if found else None

    assert as_without(1, until=6) is None
    restore.ask(tmp_path, 2)
    assert as_without(2, until=4) == 2
    assert (steps_in(tmp_path), aside(tmp_path)) == ([2, 4], ["06", "04"])
    assert as_without(3, until=4) == 4
    restore.ask(tmp_path, 6)
    assert as_without(4, until=6) == 6


def test_a_snapshot_that_is_gone_when_it_is_to_be_restored_moves_no_other_one(
    job: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as by the retention of an attempt on a lost node, which saves meanwhile."""
    restore.ask(job, 2)
    assert main(["rm", str(job), "--step", "2"]) == 0
    assert resumed(job, 1) == 6
    assert "step 2 is not restored: its snapshot has been removed since" in caplog.text
    assert (steps_in(job), aside(job)) == ([4, 6], [])
    assert restore.asked(job) is None


def test_a_volume_that_cannot_say_whether_it_is_there_takes_back_no_restore(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore.ask(job, 2)
    lstat = os.lstat

    def broken(path: Any, **more: Any) -> Any:
        if str(path).endswith("step-000000000002"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return lstat(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", broken)
        with pytest.raises(SnapshotError, match="Input/output error"):
            resumed(job, 1)
    assert resumed(job, 2) == 2


def test_a_request_that_cannot_be_read_now_is_carried_out_later(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore.ask(job, 2)
    with monkeypatch.context() as patched:
        is_unreadable(patched, job / restore.REQUEST)
        with pytest.raises(SnapshotError, match="Input/output error"):
            resumed(job, 1, until=8)
    assert resumed(job, 2) == 2


def test_a_client_that_remembers_that_there_was_no_request_is_made_to_ask_the_server(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of NFS, which drops what it knows of a folder when it sets the folder's time."""
    restore.ask(job, 2)
    request = (job / restore.REQUEST).read_bytes()
    (job / restore.REQUEST).unlink()
    utime = os.utime

    def refresh(path: Any, *args: Any, **more: Any) -> None:
        if path == job:
            (job / restore.REQUEST).write_bytes(request)
        utime(path, *args, **more)

    monkeypatch.setattr(os, "utime", refresh)
    assert resumed(job, 1) == 2


def test_checkpoints_of_the_program_are_restored_and_set_aside_as_well(job: Path) -> None:
    for step in (3, 5):
        checkpoint(job, attempt=1, step=step)
    restore.ask(job, 3)
    assert resumed(job, 2) == 2
    assert list(steps_in(job, "checkpoint")) == [3]
    assert aside(job) == ["06", "04", "05"]


def test_a_rollback_removes_nothing_that_was_set_aside(job: Path) -> None:
    ask(Fence.acquire(job, created=1, attempt=1, uid="uid-1"), step=5)
    restore.ask(job, 2)
    assert resumed(job, 2) == 2
    assert aside(job) == ["06", "04"]


@pytest.mark.parametrize("renames", [0, 1, None])
def test_a_rollback_that_was_not_carried_out_yet_does_not_remove_what_is_restored(
    job: Path, renames: int | None
) -> None:
    """Nor after a crash before or after the rollback is over. Its batches are skipped all the same."""
    restore.ask(job, 2)
    assert resumed(job, 1, until=4) == 2
    ask(Fence.acquire(job, created=1, attempt=1, uid="uid-1"), step=5)
    restore.ask(job, 6)
    fence = Fence.acquire(job, created=1, attempt=2, uid="uid-1")
    if renames is not None:
        with pytest.raises(OSError, match="dies here"):
            restore.carry_out(job, fence, Dies(1 + renames))
    assert resumed(job, 3) == 6
    assert (steps_in(job), aside(job)) == ([2, 4, 6], ["04"])
    assert asked(fence) == [5]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_in_the_middle_loses_nothing(job: Path, renames: int) -> None:
    restore.ask(job, 2)
    with pytest.raises(OSError, match="dies here"):
        restore.carry_out(job, Fence.acquire(job, created=1, attempt=1, uid="uid-1"), Dies(renames))
    assert resumed(job, 2) == 2
    assert sorted(aside(job)) == ["04", "06"]


def test_a_crash_between_snapshot_and_checkpoint_of_a_step_parts_them_for_no_time(job: Path) -> None:
    checkpoint(job, attempt=1, step=6)
    restore.ask(job, 2)
    assert resumed(job, 2) == 2
    restore.ask(job, 6)
    with pytest.raises(OSError, match="dies here"):
        restore.carry_out(job, Fence.acquire(job, created=1, attempt=3, uid="uid-1"), Dies(1))
    assert aside(job) == ["04", "06"]
    assert resumed(job, 4) == 6
    assert list(steps_in(job, "checkpoint")) == [6]
    assert aside(job) == ["04"]


def test_a_checkpoint_of_the_same_step_that_was_not_asked_for_stays_aside(job: Path) -> None:
    """It is of the steps before the restore, the snapshot of those since."""
    checkpoint(job, attempt=1, step=6)
    restore.ask(job, 2)
    assert resumed(job, 2, until=8) == 2
    restore.ask(job, 6)
    assert resumed(job, 3) == 6
    assert list(steps_in(job, "checkpoint")) == []
    assert aside(job) == ["08", "06", "04", "06"]


@pytest.mark.parametrize("renames", [0, 1, 2, 3, None])
def test_what_a_lost_node_saves_of_the_same_step_is_set_aside_for_the_one_asked_for(
    job: Path, renames: int | None
) -> None:
    """That one is verified, and its checkpoint is of the same steps."""
    checkpoint(job, attempt=0, step=6)
    restore.ask(job, 2)
    lost = Run(job, attempt=1, keep=1000)
    lost.snapshots.resume()
    restore.ask(job, 6)
    lost.train(6)
    lost.snapshots.close()
    if renames is not None:
        with pytest.raises(OSError, match="dies here"):
            restore.carry_out(job, Fence.acquire(job, created=1, attempt=2, uid="uid-1"), Dies(renames))
    assert resumed(job, 3) == 6
    for series in ("step", "checkpoint"):
        assert manifest_in(job / f"{series}-000000000006").attempt == 0
    assert steps_in(job) == [2, 4, 6]
    assert sorted(aside(job)) == ["04", "06"]
    assert restore.asked(job) is None


class Dies(Stops):
    """Also before a file is removed."""

    def remove_tree(self, path: Path) -> None:
        if self.left == 0:
            raise OSError("the process dies here")
        super().remove_tree(path)


def test_an_attempt_that_was_replaced_moves_nothing(job: Path) -> None:
    old = Fence.acquire(job, created=1, attempt=1, uid="uid-1")
    Fence.acquire(job, created=1, attempt=2, uid="uid-1")
    restore.ask(job, 2)
    with pytest.raises(FencedError):
        restore.carry_out(job, old)
    assert steps_in(job) == [2, 4, 6]


def test_a_job_that_begins_anew_does_not_go_back_to_what_an_earlier_one_had_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, until=6)
    restore.ask(tmp_path, 2)
    job_of(tmp_path, 1, attempt=1).snapshots.resume()
    saved(tmp_path, 2, until=4)
    restore.ask(tmp_path, 6)
    resumed = job_of(tmp_path, 2, attempt=1).snapshots.resume()
    assert resumed is not None
    assert (resumed.step, resumed.uid) == (4, "uid-2")
    assert "step 6 is not restored: an earlier job saved it, and this one begins anew" in caplog.text
    assert (steps_in(tmp_path), aside(tmp_path), restore.asked(tmp_path)) == ([2, 4], ["06", "04"], None)


@pytest.mark.parametrize(("anew", "step"), [(True, None), (False, 2)])
def test_a_job_that_begins_anew_does_so_although_a_restore_was_asked_of_the_one_before(
    tmp_path: Path, anew: bool, step: int | None
) -> None:
    saved(tmp_path, 1, until=6)
    restore.ask(tmp_path, 2)
    resumed = job_of(tmp_path, 2, anew=anew).snapshots.resume()
    assert (resumed and resumed.step) == step
    assert restore.asked(tmp_path) is None
    assert aside(tmp_path) == ([] if anew else ["06", "04"])
    assert steps_in(tmp_path / "earlier" / "uid-2") == ([2, 4, 6] if anew else [])


def test_a_job_that_begins_anew_goes_back_to_a_snapshot_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, 1, until=4)
    restore.ask(tmp_path, 2)
    resumed = job_of(tmp_path, 1, attempt=1).snapshots.resume()
    assert resumed is not None
    assert resumed.step == 2


@pytest.mark.parametrize(
    "content", ["", "[]", '{"step": "x", "after": ""}', '{"step": 1e999, "after": ""}', '{"after": ""}']
)
def test_a_request_that_says_nothing_changes_nothing(job: Path, content: str) -> None:
    (job / restore.REQUEST).write_text(content)
    assert resumed(job, 1) == 6


def test_restoring_needs_no_torch(volume: Any, run_script: Any) -> None:
    volume.save(volume.writer(), 1)
    program = (
        "import sys; sys.modules['torch'] = None; from ddp_trainer.snapshots.__main__ import main; "
        f"sys.exit(main(['restore', {str(volume.directory)!r}, '--step', '1']))"
    )
    done = run_script("-c", program)
    assert done.returncode == 0, done.stderr
