"""What is made of each wrong script, compared with the page that people read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.command import COMMAND
from tests.support.local_run import environment
from tests.wrong_scripts import GROUPS, JOB, SCRIPTS, golden, run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

NAMES = [name for group in GROUPS.values() for name in group]
ASKED = (*GROUPS["Exceptions"], *GROUPS["Exit codes and early ends"])
"""Of which the real command is asked too, with what is left of the run on its volume."""


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_script_is_judged_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = run(name, tmp_path)
    assert row.golden == golden(name), row.message
    # what `ddpjob why` says on a cluster, and what it says of the folder
    answers = [row.answer, why(tmp_path)] if name in ASKED else [row.answer]
    for answer in answers:
        assert answer.startswith(("wrong: Succeeded", "wrong: Failed")), answer
        for words in (row.reason, row.message.partition("\n")[0][:80], row.advice):
            assert words in answer
    if name == "exit_code":
        assert "attempt 0, exit code 3" in answers[-1]


def why(shared: Path) -> str:
    """What `ddpjob why` prints of the job."""
    command = [*COMMAND, "why", JOB, "--shared", str(shared)]
    asked = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert asked.stderr == ""
    return asked.stdout


def test_every_script_is_on_the_page() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
