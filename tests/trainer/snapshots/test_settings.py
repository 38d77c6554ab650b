"""Where a job's snapshots lie and how often there is one, as the environment says, and what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddp_trainer.contract.environment import parse_job
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.session import Snapshots
from ddp_trainer.snapshots.trust.names import step_directory
from ddp_trainer.snapshots.values import Identity, Progress

ENVIRON = {
    "DDPJOB_NAME": "digits",
    "DDPJOB_UID": "u",
    "DDPJOB_CREATED": "5",
    "DDPJOB_ATTEMPT": "1",
    "DDPJOB_NODES": "2",
}


def snapshots(shared: Path, **changes: str) -> Snapshots:
    job = parse_job({**ENVIRON, "DDPJOB_SHARED": str(shared), **changes}, default_name="training")
    return Snapshots.of_job({}, job, World(), strategy="single", global_batch=1)


def test_the_job_names_the_directory_and_the_identity(tmp_path: Path) -> None:
    found = snapshots(tmp_path)
    assert found.directory == tmp_path / "checkpoints" / "digits"
    assert found.identity == Identity("digits", "u", 5, 1, 0, 1, nodes=2)


def test_the_job_says_how_many_snapshots_stay_and_which_ones_stay_for_good(tmp_path: Path) -> None:
    keeps = {"DDPJOB_SNAPSHOT_KEEP": "1", "DDPJOB_SNAPSHOT_KEEP_EVERY": "2", "DDPJOB_SNAPSHOT_EVERY": "1steps"}
    found = snapshots(tmp_path, **keeps)
    found.resume()
    for step in range(1, 6):
        assert found.save(Progress(step, 0, step), wait=True)
    found.close()
    kept = sorted(path.name for path in found.directory.glob("step-*"))
    assert kept == [step_directory(step) for step in (2, 4, 5)]


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DDPJOB_SNAPSHOT_EVERY": "soon"}, "DDPJOB_SNAPSHOT_EVERY='soon' is not an interval"),
        ({"DDPJOB_NAME": "../other"}, r"job name '\.\./other' cannot be a directory"),
        ({"DDPJOB_NAME": ".."}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a/b"}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a..b"}, "cannot be a directory"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        snapshots(tmp_path, **changes)


@pytest.mark.fault(45)
def test_a_job_whose_directory_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "digits").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="outside the job's own place"):
        snapshots(tmp_path)


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EROFS, UserError, r"checkpoints/digits cannot be made: .*\. Mount the volume writable for this user"),
        (errno.EACCES, UserError, "Mount the volume writable"),
        (errno.EPERM, UserError, "Mount the volume writable"),
        (errno.EIO, OSError, "Input/output error"),
    ],
)
def test_a_volume_on_which_no_directory_can_be_made_is_mounted_wrongly_where_a_retry_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], said: str
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(kind, match=said):
        snapshots(tmp_path)
