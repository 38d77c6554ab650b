"""A script of this folder with real ranks, and what its scenarios returned on each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked import start as forked

HERE = Path(__file__).parent


def torchrun(ranks: int, script: str, out: Path, *scenarios: str) -> None:
    """Run a script of this folder to its end; it leaves its results below `out`."""
    done = subprocess.run(
        forked.command(ranks, str(HERE / script), str(out), *scenarios),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]


def of_both_ranks(out: Path) -> list[dict[str, Any]]:
    """By rank: scenario -> what it returned there."""
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def until_one_fails(out: Path) -> list[str]:
    """What the two ranks of `one_fails.py` print."""
    command = forked.command(0, str(HERE / "one_fails.py"), str(out))
    ranks = [
        subprocess.Popen(command, env=_environment() | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE.parents[2] / "trainer_image"), "OMP_NUM_THREADS": "1"}
