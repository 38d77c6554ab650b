"""What is made of each wrong script, compared with the page that people read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.wrong_scripts import GROUPS, SCRIPTS, golden, run

pytestmark = [pytest.mark.local, pytest.mark.timeout(240)]

NAMES = [name for group in GROUPS.values() for name in group]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_script_is_judged_as_the_page_says(name: str, tmp_path: Path) -> None:
    row = run(name, tmp_path)
    assert row.golden == golden(name), row.message
    # what `ddpjob why` says on a cluster
    assert row.answer.startswith(("wrong: Succeeded", "wrong: Failed")), row.answer
    for words in (row.reason, row.message.partition("\n")[0][:80], row.advice):
        assert words in row.answer


def test_every_script_is_on_the_page() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
