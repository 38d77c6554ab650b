"""`ddpjob snapshots` on a folder of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.local_run import PACKAGES, environment
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddpjob_operator.cli.dashboard import show_folder
from ddpjob_operator.cli.folder import job_in
from ddpjob_operator.cli.parameters import Output
from ddpjob_operator.cli.snapshots import run_here, show_here, what_begins_it
from ddpjob_operator.local.volume import VolumeError, lock_job, newest_snapshot
from ddpjob_operator.wire.jobs import parse_job


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """With the directory of one snapshot, which has no manifest."""
    (tmp_path / "checkpoints" / "digits" / "step-000000000010").mkdir(parents=True)
    return tmp_path


@pytest.mark.processes
def test_the_trainers_command_lists_verifies_restores_and_removes(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(shared, "digits", "ls") == 0
    assert "10  BAD" in capsys.readouterr().out
    assert run_here(shared, "digits", "verify") == 1
    assert run_here(shared, "digits", "restore", ["--step", "10"]) == 1
    assert run_here(shared, "digits", "rm", ["--step", "10"]) == 0
    assert capsys.readouterr().out.endswith("step-000000000010: removed\n")
    assert run_here(shared, "digits", "ls") == 0
    assert "no snapshot in" in capsys.readouterr().out


@pytest.mark.processes
def test_a_folder_whose_name_the_locale_cannot_decode_is_listed(tmp_path: Path) -> None:
    (tmp_path / "grün" / "checkpoints" / "digits").mkdir(parents=True)
    command = [sys.executable, "-m", "ddpjob_operator.cli.main", "snapshots", "ls", "digits", "--shared", "grün"]
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.pathsep.join(map(str, PACKAGES))
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | ascii_locale | {"PYTHONPATH": path}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"no snapshot in ")


@pytest.mark.parametrize(
    ("phase", "words"), [("Suspended", "ddpjob unsuspend digits"), ("Succeeded", "--resume"), ("Failed", "--resume")]
)
def test_after_a_restore_the_command_that_begins_from_it_is_named(phase: str, words: str) -> None:
    metadata = {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": "2030-01-01T12:00:00Z"}
    assert words in what_begins_it(parse_job({"metadata": metadata, "spec": {}, "status": {"phase": phase}}))


@pytest.mark.parametrize("command", ["rm", "restore"])
def test_nothing_is_changed_while_a_run_holds_the_job(
    shared: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_job(shared, "digits"):
        assert run_here(shared, "digits", command, ["--step", "10"]) == 2
    assert "job digits is already running" in capsys.readouterr().err
    assert (shared / "checkpoints" / "digits" / "step-000000000010").is_dir()


@pytest.mark.processes
def test_what_changes_snapshots_holds_the_job_also_when_the_command_has_been_ended(shared: Path) -> None:
    """A run that began meanwhile would resume from a snapshot that is being removed."""
    trainer = shared / "trainer"
    trainer.write_text("#!/bin/sh\necho begun\nread end\n")
    trainer.chmod(0o755)
    script = """
        import sys
        from pathlib import Path
        from ddpjob_operator.cli.snapshots import run_here
        shared, sys.executable = map(Path, sys.argv[1:])
        run_here(shared, "digits", "rm", ["--step", "10"])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), shared, trainer]

    def is_free() -> bool:
        with suppress(VolumeError), lock_job(shared, "digits"):
            return True
        return False

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as changing:
        assert changing.stdin is not None
        assert changing.stdout is not None
        assert changing.stdout.readline() == b"begun\n"
        changing.terminate()
        assert changing.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        is_held = not is_free()
        changing.stdin.close()
    assert is_held
    assert eventually(is_free, "the trainer's command has ended")


def test_a_run_shows_the_step_that_it_is_to_begin_from(shared: Path) -> None:
    assert newest_snapshot(shared, "digits") == 10
    (shared / "checkpoints" / "digits" / "restore.json").write_text('{"step": 5, "after": ""}')
    assert newest_snapshot(shared, "digits") == 5
    (shared / "checkpoints" / "digits" / "restore.json").write_text('{"step": 1e999, "after": ""}')
    assert newest_snapshot(shared, "digits") == 10


@pytest.mark.parametrize(
    ("output", "said"),
    [(Output.TEXT, "no snapshot in {}/checkpoints/began\n"), (Output.JSON, '{{\n  "snapshots": []\n}}\n')],
)
def test_a_job_that_has_only_logs_has_no_snapshots(
    shared: Path, output: Output, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared / "logs" / "began" / "pods").mkdir(parents=True)
    (shared / "logs" / "Began").mkdir()
    assert run_here(shared, "Began", "ls") == 2, "no job has such a name"
    assert show_here(shared, "began", output) == 0
    assert capsys.readouterr().out == said.format(shared)
    assert run_here(shared, "began", "rm", ["--step", "10"]) == 2


def test_a_home_directory_that_is_not_known_has_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("~no-such-user/shared")
    assert (run_here(folder, "digits", "ls"), job_in(folder, "digits"), show_folder(folder, "", 0)) == (2, None, 2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert all("~no-such-user/shared" in line for line in said)


@pytest.mark.parametrize("name", ["digitz", "../digits", "."])
def test_a_job_that_is_not_there_is_refused_with_those_that_are(
    shared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared / "checkpoints" / "began").mkdir()
    (shared / "checkpoints" / "began" / "run.lock").touch()
    assert run_here(shared, name, "ls") == 2
    assert capsys.readouterr().err == f"error: {shared} has no snapshots of {name}; it has those of digits\n"
