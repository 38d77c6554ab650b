"""`ddpjob run train.py`: the code of a folder, as it is at each start."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.support.forked_run import start
from tests.support.waiting import PATIENCE_SECONDS
from tests.support.wheels import wheel

pytestmark = pytest.mark.local

SCRIPT = """
import sys
from pathlib import Path
from pkg.model import layers
print("arguments", sys.argv[1:], "layers", layers, "config", Path("config.txt").read_text())
with open("seen.txt", "a") as seen:
    seen.write(f"{layers} ")
print("kept", Path("seen.txt").read_text())
runs = Path(__file__).resolve().parent / "runs.txt"
with runs.open("a") as file:
    file.write(f"{layers} ")
print("kept beside the script", runs.read_text())
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of `ddpjob run` in a folder."""
    with tempfile.TemporaryFile() as output:
        code = start([*arguments], folder, output.fileno()).wait(PATIENCE_SECONDS)
        output.seek(0)
        return code, output.read().decode()


def test_an_edited_line_runs_and_relative_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.txt").write_text("a")
    (tmp_path / "pkg" / "model.py").write_text("layers = 2")
    code, output = run(tmp_path, "train.py", "--", "--lr", "3e-4")
    assert (code, "arguments ['--lr', '3e-4'] layers 2 config a" in output) == (0, True), output
    assert "3 files, 1 kB" in output
    (tmp_path / "pkg" / "model.py").write_text("layers = 3")
    code, output = run(tmp_path, "train.py")
    assert (code, "arguments [] layers 3 config a" in output) == (0, True), output
    assert "kept 2 3" in output
    assert "kept beside the script 2 3" in output
    assert not (tmp_path / "seen.txt").exists(), "the folder itself is not written to"
    refused, said = run(tmp_path, "train.yaml", "--nodes", "2")
    assert refused == 2
    assert "--nodes: for a script" in said


def test_packages_that_the_code_requires_are_installed_once(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    (tmp_path / "train.py").write_text("import greeting\nprint(greeting.TEXT)\n")
    (tmp_path / "requirements.txt").write_text("--no-index\n./wheels/greeting-1.0-py3-none-any.whl\n")
    for said in ("installed 1 package of requirements.txt", "requirements.txt: installed already"):
        code, output = run(tmp_path, "train.py", "--requirements", "requirements.txt")
        assert (code, "hello from greeting" in output, said in output) == (0, True, True), output
