"""Where a script finds itself: folders that are there, and a working directory that outlives its pod."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_trainer.contract.environment import JobEnvironment, parse_job, parse_rank
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.work_folder import enter_work_folder
from ddp_trainer.rank.worker import run_target


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobEnvironment:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
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


@pytest.mark.parametrize("target", [("script", "src/run_here.py"), ("module", "src.run_here")])
def test_submitted_code_works_where_its_files_are_and_imports_what_is_there(
    job: JobEnvironment, target: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, work = job.shared / "code", job.shared / "work" / "mine"
    (work / "src").mkdir(parents=True)
    code.mkdir(parents=True)
    (code / "run_here.py").write_text(
        "import sys, own_module_of_the_code\n"
        "from pathlib import Path\n"
        "print(Path(__file__).parent, sys.argv[1:], Path('own_module_of_the_code.py').exists())\n"
    )
    (code / "own_module_of_the_code.py").touch()
    (work / "src/run_here.py").symlink_to(code / "run_here.py")
    (work / "own_module_of_the_code.py").symlink_to(code / "own_module_of_the_code.py")
    enter_work_folder(replace(job, code_sha256="ab" * 32), scratch=None)
    try:
        run_target(*target, ["--lr", "1"])
    finally:
        sys.modules.pop("own_module_of_the_code", None)
        sys.modules.pop("src", None)
    assert capsys.readouterr().out == f"{work / 'src'} ['--lr', '1'] True\n"


def test_a_relative_script_that_is_not_there_is_named_with_the_folder_where_it_should_be(job: JobEnvironment) -> None:
    with pytest.raises(UserError, match=f"the script train.py does not exist .*{Path.cwd()}.*spec.entrypoint.script"):
        run_target("script", "train.py", [])


def test_submitted_code_does_not_run_without_its_working_directory(job: JobEnvironment) -> None:
    job.shared.write_text("no folder")
    with pytest.raises(NotADirectoryError):
        enter_work_folder(replace(job, code_sha256="ab" * 32), scratch=Path.cwd())
