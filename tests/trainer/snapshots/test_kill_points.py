"""SIGKILL at every write, fsync, rename and removal of a save: the newest valid snapshot loads, every time. The same
for a checkpoint that a training program writes.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.starting import starts_processes
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture(scope="module", params=["step", "checkpoint"])
@starts_processes
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    import os
    import subprocess
    import sys

    here = Path(__file__).parent
    environ = {**os.environ, "PYTHONPATH": str(here.parents[2] / "trainer_image")}
    volume = tmp_path_factory.mktemp("volume") / "digits"
    script = [sys.executable, str(here / "kill_points.py"), str(volume), request.param]
    done = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def broken(runs: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    return [killed for killed in runs if not holds(killed)]


def test_every_kind_of_operation_was_a_kill_point(runs: list[dict[str, Any]]) -> None:
    kinds = {(killed["operation"].split()[0], killed["torn"]) for killed in runs}
    assert kinds == {(name, False) for name in ("mkdir", "create", "write", "fsync", "rename", "remove")} | {
        ("write", True)
    }


def test_every_run_was_really_killed(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["signal"] == signal.SIGKILL) == []


@pytest.mark.fault(36)
def test_no_snapshot_that_save_promised_is_ever_lost(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["newest"] >= killed["promised"]) == []


def test_what_loads_is_what_was_saved_byte_for_byte(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["intact"]) == []


def test_the_next_attempt_leaves_no_litter_and_accuses_no_snapshot(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["odd"] == []) == []


@pytest.mark.fault(36)
def test_every_snapshot_that_has_a_name_verifies(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["bad"] == []) == []


def test_the_next_attempt_can_save_at_once(runs: list[dict[str, Any]]) -> None:
    assert broken(runs, lambda killed: killed["next"] == killed["newest"] + 1) == []
