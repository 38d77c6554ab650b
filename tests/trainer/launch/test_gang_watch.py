"""Which ranks the launcher asks for their stacks."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_trainer.contract.run_dir import register
from ddp_trainer.launch.gang_watch import _with_stacks


def test_a_rank_that_is_another_program_by_now_is_not_asked(tmp_path: Path) -> None:
    """It has no handler of the signal any more, and would die of it."""
    register(tmp_path, 0, 0, os.getpid())
    register(tmp_path, 1, 1, os.getpid(), replaced=True)
    assert [entry["rank"] for entry in _with_stacks(tmp_path)] == [0]
