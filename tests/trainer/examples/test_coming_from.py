"""docs/coming-from.md: the script with mp.spawn runs as it was, and as a job with the commands of the page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.ports import free_port
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.documented import ROOT, blocks, pattern
from tests.trainer.examples.test_bring_your_script import lines
from tests.trainer.examples.workbook import Example, Workbook
from tests.trainer.forked import start as forked

BLOCKS = blocks((ROOT / "docs" / "coming-from.md").read_text())
(DIFF,) = (block.text for block in BLOCKS if block.language == "diff")
(COMMANDS,) = (block for block in BLOCKS if block.language == "sh" and not block.attributes)
(SHOWN,) = (block.text for block in BLOCKS if block.language == "text")


@pytest.fixture
@starts_processes
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_script_with_mp_spawn_runs_before_and_afterwards_as_a_job(folder: Path) -> None:
    checkpoint = folder / "checkpoint.pt"
    before = folder / "before.py"
    before.write_text(lines(DIFF, "-").replace("12355", str(free_port())))
    subprocess.run(forked.command(0, str(before), "1"), cwd=folder, check=True, timeout=PATIENCE_SECONDS)
    checkpoint.unlink()

    (folder / "multigpu.py").write_text(lines(DIFF, "+"))
    example = Example("multigpu", COMMANDS, SHOWN.splitlines(), [], COMMANDS.text)
    workbook = Workbook(folder, [example])
    workbook.put_commands_on_path()
    workbook.run_in_bash(example)
    assert example.code == 0, example.output
    assert [line for line in example.shown if not pattern(line).search(example.output)] == [], example.output
    assert checkpoint.is_file()
