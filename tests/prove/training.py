"""Starting the trainer for a proof, watched from inside its ranks or not, and reading what it leaves."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.trainer.train.volume import HERE, ROOT, Volume, finish

DEADLINE: Final = 1800
"""Seconds that any start may take: minutes on a machine that does nothing else, and no run may hang for ever."""
OWN: Final = Path(__file__).parent
WATCHED: Final = str(OWN / "watched.py")
PATHS: Final = f"{ROOT / 'trainer_image'}:{HERE}:{OWN}"


class Untrained(Exception):
    """The trainer did not do what the proof needs; the message ends with what it said."""


def started(volume: Volume, ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train until it ends, in whatever way; with 0 ranks without torchrun, as one process. Raises Untrained."""
    try:
        return finish(volume.start(ranks, *arguments, PYTHONPATH=PATHS, **environment), DEADLINE)
    except subprocess.TimeoutExpired as late:
        raise Untrained(f"training with {' '.join(arguments)} did not end within {late.timeout:.0f} s") from late


def trained(volume: Volume, ranks: int, *arguments: str, **environment: str) -> Volume:
    """Train to the end. Raises Untrained."""
    done = started(volume, ranks, *arguments, **environment)
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise Untrained(f"training with {' '.join(arguments)} ended with {done.returncode}:\n{said}")
    return volume


def trained_in_one_start(volume: Volume, ranks: int, jobs: Mapping[str, tuple[str, ...]]) -> None:
    """Train several jobs of one volume, one after another in the same ranks. Raises Untrained."""
    volume.root.mkdir(parents=True, exist_ok=True)
    (volume.root / "runs.json").write_text(json.dumps(jobs))
    trained(volume, ranks, "several.py", str(volume.root / "runs.json"))


def killed(volume: Volume, ranks: int, kill: Mapping[str, Any], *arguments: str, **environment: Any) -> dict[str, Any]:
    """Train until all ranks are killed where `kill` says (`watched.py`); where that was. Raises Untrained if not."""
    samples = environment.pop("samples", False)
    notes = volume.root / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    watch = json.dumps({"notes": str(notes), "samples": samples, "kill": dict(kill)})
    done = started(volume, ranks, WATCHED, *arguments, WATCH=watch, **environment)
    place = notes / "killed.json"
    if not done.returncode or not place.exists():
        raise Untrained(f"the ranks were to be killed at {dict(kill)}, which never came:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(place.read_text())
    place.unlink()
    return found


def losses(volume: Volume) -> tuple[float, ...]:
    """The loss of each step from step 1 on, NaN where it was not finite. Raises Untrained if a step is missing."""
    found = volume.losses()
    if list(found) != list(range(1, len(found) + 1)):
        raise Untrained(f"{volume.logs} has the losses of steps {list(found)}")
    return tuple(math.nan if loss is None else loss for loss in found.values())
