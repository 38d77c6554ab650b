"""What is made of each wrong script, compared with the page that people read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support import forked_run
from tests.support.command import ddpjob
from tests.wrong_scripts import GROUPS, JOB, SCRIPTS, Row, golden, in_new_processes, ranks_per_node, run

pytestmark = pytest.mark.local

NAMES = [name for group in GROUPS.values() for name in group]
ASKED = [
    name
    for group in (
        "Exceptions",
        "Exit codes and early ends",
        "Signals and crashes in native code",
        "Memory, files and the network",
    )
    for name in GROUPS[group]
]
"""Of which the real command is asked too, with what is left of the run on its volume."""

SET_BEFORE_TORCH = [path.stem for path in SCRIPTS.glob("*.py") if 'os.environ["TORCH_' in path.read_text()]
"""What torch reads when it is imported, which a forked rank has behind it."""

ENDS = {
    "exit_code": "exit code 3",
    "killed": "SIGKILL",
    "killed_on_another_node": "SIGKILL",
    "segmentation_fault": "SIGSEGV",
    "heap_corruption": "SIGABRT",
    "abort": "SIGABRT",
    "bus_error": "SIGBUS",
    "alarm": "SIGALRM",
}
"""How the process of the rank ended, where the script decides that."""


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_script_is_judged_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = run(name, tmp_path, in_new_processes if name in SET_BEFORE_TORCH else forked_run.outcome)
    assert row.golden == golden(name), row.message
    # what `ddpjob why` says on a cluster, and what it says of the folder
    answers = [row.answer, why(tmp_path)] if name in ASKED else [row.answer]
    for answer in answers:
        assert answer.startswith(("wrong: Succeeded", "wrong: Failed")), answer
        for words in (row.reason, row.message.partition("\n")[0][:80], row.advice):
            assert words in answer
        if name in ASKED and row.reason != "Succeeded":
            assert re.search(ended(name, row), answer, re.MULTILINE), answer


def ended(name: str, row: Row) -> str:
    """The line that says where it ended and how: in the rank that the page names, which is in one pod."""
    node, rank = (r"\d", r"\d") if row.rank == "any" else (int(row.rank) // ranks_per_node(name), row.rank)
    how = ENDS.get(name, "(SIG[A-Z]+|exit code [1-9][0-9]*)")
    return rf"^ *rank {rank} of pod {JOB}-0-{node} on node \S+, attempt 0(, step \d+)?, {how}$"


def test_the_command_is_asked_about_thirty_failures() -> None:
    assert sum("`Succeeded`" not in golden(name) for name in ASKED) >= 30


def why(shared: Path) -> str:
    """What `ddpjob why` prints of the job."""
    asked = ddpjob(None, "why", JOB, "--shared", str(shared))
    assert asked.stderr == ""
    return asked.stdout


def test_every_script_is_on_the_page() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
