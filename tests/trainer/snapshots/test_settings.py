"""What the operator tells a run about its snapshots, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.settings import Settings
from ddp_trainer.snapshots.values import Identity

ENVIRON = {
    "DDPJOB_NAME": "digits",
    "DDPJOB_UID": "u",
    "DDPJOB_CREATED": "5",
    "DDPJOB_ATTEMPT": "1",
    "DDPJOB_NODES": "2",
}


def from_env(shared: Path, **changes: str) -> Settings:
    environ = {**ENVIRON, "DDPJOB_SHARED": str(shared), **changes}
    environ = {name: value for name, value in environ.items() if value}
    return Settings.from_env(environ)


def test_the_environment_of_the_contract_is_read(tmp_path: Path) -> None:
    settings = from_env(tmp_path, DDPJOB_SNAPSHOT_EVERY="2epochs", DDPJOB_SNAPSHOT_KEEP="5")
    assert settings.directory == tmp_path / "checkpoints" / "digits"
    assert settings.identity == Identity("digits", "u", 5, 1, 0, 1, nodes=2)
    assert (str(settings.every), settings.keep) == ("2epochs", 5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DDPJOB_NAME": ""}, "DDPJOB_NAME is not set"),
        ({"DDPJOB_ATTEMPT": "-1"}, "DDPJOB_ATTEMPT is '-1', not a whole number"),
        ({"DDPJOB_SNAPSHOT_EVERY": "soon"}, "'soon' is not an interval"),
        ({"DDPJOB_NAME": "../other"}, r"job name '\.\./other' cannot be a directory"),
        ({"DDPJOB_NAME": ".."}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a/b"}, "cannot be a directory"),
        ({"DDPJOB_NAME": "a..b"}, "cannot be a directory"),
    ],
)
def test_a_wrong_environment_is_named(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_env(tmp_path, **changes)


def test_a_job_whose_directory_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "digits").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="outside the job's own place"):
        from_env(tmp_path)
