"""The command itself: exit codes, streams, and how soon it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import pytest
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.cli.main import main
from ddpjob_operator.local.record import StatusFile
from ddpjob_operator.wire.jobs import parse_job

ROOT = Path(__file__).parents[3]
JOB = """\
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata:
  name: digits
spec:
  nodes: 2
  procsPerNode: 2
"""
FOREIGN = ("kopf", "kubernetes", "aiohttp", "torch")


def ddpjob(*arguments: str, cwd: Path, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    """What the command does, in a copy of this process: to start Python and import all takes half a second of a
    processor. `stdout` is a descriptor; without it, the output is returned.
    """
    with TemporaryFile() as out, TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            _run_to_the_end(arguments, cwd, out.fileno() if stdout is None else stdout, errors.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), errors.read().decode())


def _run_to_the_end(arguments: Sequence[str], folder: Path, stdout: int, stderr: int) -> NoReturn:
    """With streams of its own; it ends as Python does."""
    code: object = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = (open(target, "w", closefd=False) for target in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        sys.argv = ["ddpjob", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def newly_imported(*arguments: str, cwd: Path) -> set[str]:
    """The packages that a new process of the command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "ddpjob_operator.cli.main", *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT / "trainer_image")])}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.processes
def test_a_valid_file_is_said_to_be_valid(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = ddpjob("validate", "job.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "job.yaml: digits is valid: 2 nodes x 2 ranks = 4 ranks\n"


@pytest.mark.processes
@pytest.mark.parametrize("command", ["validate", "run"])
def test_an_invalid_file_exits_with_2_and_one_line_a_problem(tmp_path: Path, command: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("nodes: 2", "nodes: 0").replace("procsPerNode", "procs"))
    done = ddpjob(command, "job.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert sorted(done.stderr.splitlines()) == [
        "error: job.yaml:6: spec.nodes: 0 is too small; use 1 or more",
        "error: job.yaml:7: spec.procs: is not a field of a DDPJob; did you mean procsPerNode?",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--chaos", "kill-rank=9@50%"],
            "error: --chaos: 'kill-rank=9@50%': the job has ranks 0 to 3; name one of them\n",
        ),
        (["--warmup", "3"], "Error: No such option: --warmup; options of the script come after --\n"),
        (["--nodes"], "Error: Option '--nodes' requires an argument.\n"),
        (["--fresh=1"], "Error: Option '--fresh' does not take a value.\n"),
        (["--shared", "job.yaml"], "job.yaml: Not a directory; choose a folder that you may write to\n"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], complaint: str
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = ddpjob("run", "job.yaml", *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(complaint)


@pytest.mark.processes
def test_a_script_that_is_not_there_is_refused_with_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "  entrypoint:\n    script: /mnt/shared/train.py\n")
    done = ddpjob("run", "job.yaml", "--shared", "here", cwd=tmp_path)
    assert done.returncode == 2
    assert f"/mnt/shared/train.py would be {tmp_path}/here/train.py on this machine" in done.stderr


@pytest.mark.processes
def test_without_torch_the_run_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    hide = "import sys; sys.path = [p for p in sys.path if 'trainer_image' not in p]; sys.modules['torch'] = None"
    (tmp_path / "bare.py").write_text(f"{hide}\nfrom ddpjob_operator.cli.main import main\nmain()\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    done = subprocess.run(
        [sys.executable, "bare.py", "run", "job.yaml"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: torch and ddp_trainer: not installed for {sys.executable}; "
        "install ddpjob[cli,trainer], as `pip install '.[cli,trainer]'` in a checkout does\n"
    )


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["-h"], ["run", "--help"]])
def test_help_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    imported = newly_imported(*arguments, cwd=tmp_path)
    assert "typer" in imported
    assert imported.isdisjoint({*FOREIGN, "yaml", "rich"})


@pytest.mark.processes
def test_validation_needs_no_cluster_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    imported = newly_imported("validate", "job.yaml", cwd=tmp_path)
    assert "ddpjob_operator" in imported
    assert imported.isdisjoint(FOREIGN)


@pytest.mark.processes
@pytest.mark.parametrize("command", ["why", "logs"])
def test_a_job_in_a_folder_is_asked_about_without_what_asks_a_cluster(tmp_path: Path, command: str) -> None:
    job = parse_job({"metadata": {"name": "digits", "namespace": "default", "uid": "uid-1"}, "spec": {}})
    StatusFile(tmp_path, job).write(job)
    imported = newly_imported(command, "digits", "--shared", str(tmp_path), cwd=tmp_path)
    assert "ddpjob_operator" in imported
    assert imported.isdisjoint(FOREIGN)


@pytest.mark.processes
def test_as_a_plugin_of_kubectl_it_calls_itself_so(tmp_path: Path) -> None:
    plugin = tmp_path / "kubectl-ddpjob"
    plugin.write_text("from ddpjob_operator.cli.main import main\nmain()\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    done = subprocess.run([sys.executable, plugin, "run", "--help"], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("Usage: kubectl ddpjob run")


@pytest.mark.processes
def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    done = ddpjob("--version", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"ddpjob {version('ddpjob')}\n")


@pytest.mark.processes
def test_several_files_and_standard_input_are_validated_together(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "wrong.yaml").write_text(JOB.replace("digits", "other").replace("nodes: 2", "nodes: 0"))
    done = ddpjob("validate", "job.yaml", "wrong.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "job.yaml: digits is valid: 2 nodes x 2 ranks = 4 ranks\n")
    assert done.stderr == "error: wrong.yaml:6: spec.nodes: 0 is too small; use 1 or more\n"


@pytest.mark.processes
def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    read, write = os.pipe()
    os.close(read)
    try:
        done = ddpjob("validate", "job.yaml", "none.yaml", cwd=tmp_path, stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 2
    assert done.stderr == "error: none.yaml: No such file or directory; name a YAML file with a DDPJob\n"


@pytest.mark.processes
@pytest.mark.parametrize(("file", "code"), [("job.yaml", 1), ("wrong.yaml", 2)])
def test_output_that_cannot_be_written_is_one_error(tmp_path: Path, file: str, code: int) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "wrong.yaml").write_text(JOB.replace("digits", "other").replace("nodes: 2", "nodes: 0"))
    with Path("/dev/full").open("w") as full:
        done = ddpjob("validate", "job.yaml", file, cwd=tmp_path, stdout=full.fileno())
    assert done.returncode == code
    *_, last = done.stderr.splitlines()
    assert last == "error: cannot write to standard output: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["validate", "-"], ["logs", "digits", "--shared", "."]], ids=" ".join)
def test_a_standard_stream_that_is_closed_is_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "logs" / "digits" / "pods").mkdir(parents=True)
    (tmp_path / "logs" / "digits" / "pods" / "digits-0-0.log").write_text("a line\n")
    command = [sys.executable, "-m", "ddpjob_operator.cli.main", *arguments]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>error.txt', "sh", *command],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "operator")}, check=False,
    )  # fmt: skip
    assert "Traceback" not in (tmp_path / "error.txt").read_text()
    assert done.returncode == (2 if arguments[0] == "validate" else 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments", [["run", "JOB"], ["submit", "train.py", "--dry-run"], ["why", "digits", "--shared", "."]], ids=" ".join
)
def test_a_folder_that_was_deleted_under_its_user_is_named(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", "from ddpjob_operator.cli.start import main; main()", *arguments]
    script = 'rmdir "$PWD"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *(str(tmp_path / "job.yaml") if word == "JOB" else word for word in command)],
        cwd=tmp_path / "gone", env=os.environ | {"PYTHONPATH": str(ROOT / "operator")}, capture_output=True, text=True,
    )  # fmt: skip
    said = "error: the folder that you are in has been deleted; cd to one that exists\n"
    assert (done.returncode, done.stderr) == (2, said)
