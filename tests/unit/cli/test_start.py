"""The installed programs, where the packages that they need are not, and while they are imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.support.waiting import PATIENCE_SECONDS

from ddpjob_operator.cli.start import PACKAGES

ROOT = Path(__file__).parents[3]
HINT = "install ddpjob[cli], as `pip install '.[cli]'` in a checkout does"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def program(entry: str, missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What pip installs for an entry point, without one package."""
    module, _, function = entry.partition(":")
    code = f"import sys; sys.modules[{missing!r}] = None; from {module} import {function}; sys.exit({function}())"
    env = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.processes
@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_without_the_extra_a_program_says_what_to_install(name: str) -> None:
    done = program(PROJECT["scripts"][name], "typer", "--version")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: typer: not installed for {sys.executable}; {HINT}\n"


@pytest.mark.processes
def test_without_the_extra_the_python_client_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None; from ddpjob import DDPJob"
    env = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ModuleNotFoundError: rich")
    assert said.endswith(f": not installed for {sys.executable}; {HINT}")


@pytest.mark.processes
def test_another_module_that_is_missing_is_a_fault_of_ours() -> None:
    done = program(PROJECT["scripts"]["ddpjob"], "ddpjob_operator.settings", "--version")
    assert (done.returncode, done.stderr.splitlines()[-1].partition(":")[0]) == (1, "ModuleNotFoundError")


def test_it_knows_every_package_of_the_extra() -> None:
    asked = [Requirement(entry).name for entry in PROJECT["optional-dependencies"]["cli"]]
    assert [name.replace("-", "_") for name in asked] == list(PACKAGES)


def interrupted(code: str, path: str, word: bytes) -> tuple[int, bytes]:
    """Exit code and errors of a program that gets a Ctrl-C once it has written this word."""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(len(word)) == word
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, errors


SLOW_MODULE = """
import os, time
os.write(1, b"importing")
time.sleep(600)
"""


@pytest.mark.processes
def test_ctrl_c_while_modules_are_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW_MODULE)
    code = "from ddpjob_operator.cli.start import main; main()"
    assert interrupted(code, f"{tmp_path}:{ROOT / 'operator'}", b"importing") == (-signal.SIGINT, b"")


SLOW_COMMANDS = """
import os, time, typer
typer.Typer.__call__ = lambda *_, **__: (os.write(1, b"building"), time.sleep(600))
from ddpjob_operator.cli.start import main
main()
"""


@pytest.mark.processes
def test_ctrl_c_while_commands_are_built_ends_it_without_a_traceback() -> None:
    assert interrupted(SLOW_COMMANDS, str(ROOT / "operator"), b"building") == (130, b"")
