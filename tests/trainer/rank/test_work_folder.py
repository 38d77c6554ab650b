"""Where a script finds itself: folders that are there, and a working directory that outlives its pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_trainer.contract.environment import JobEnvironment, parse_job, parse_rank
from ddp_trainer.rank.work_folder import enter_work_folder


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobEnvironment:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    return parse_job({"DDPJOB_NAME": "mine", "DDPJOB_SHARED": str(tmp_path / "shared")}, default_name="")


def test_a_script_does_not_work_where_files_end_with_the_pod(job: JobEnvironment) -> None:
    enter_work_folder(job, parse_rank({"DDPJOB_SCRATCH": str(Path.cwd())}).scratch)
    assert Path.cwd() == job.shared / "work" / "mine"


@pytest.mark.parametrize("scratch", [None, Path("/tmp")])
def test_a_directory_that_the_image_or_a_person_has_chosen_is_kept(job: JobEnvironment, scratch: Path | None) -> None:
    before = Path.cwd()
    enter_work_folder(job, scratch)
    assert Path.cwd() == before
    assert {folder.name for folder in job.shared.iterdir()} == {"datasets", "checkpoints", "logs"}


def test_a_volume_that_cannot_be_written_to_is_named_with_what_will_be_lost(job: JobEnvironment, capsys) -> None:
    job.shared.write_text("no folder")
    enter_work_folder(job, Path.cwd())
    assert f"files that the script writes to {Path.cwd()} end with the pod" in capsys.readouterr().err
