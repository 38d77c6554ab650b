"""The pod's assignment (attempt, node rank, nodes) where it can change: three files in DDPJOB_ASSIGNMENT_DIR.

The operator relabels a pod that is kept after a failure, and the kubelet writes the labels into the pod (a downward API
volume): `attempt`, `node-rank` and `nodes`. It swaps all three at once by renaming a symbolic link, `..data`
(k8s.io/kubernetes/pkg/volume/util/atomic_writer.go), so the link is followed once and the files are of one moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ddp_trainer.contract.environment import MAX_ATTEMPT, MAX_NODES, Assignment
from ddp_trainer.contract.exit_codes import UserError

SPARE: Final = "none"
"""The node rank of a pod that waits, warm, for one."""

LOOK_SECONDS: Final = 0.2

_LINK: Final = "..data"
_SWAPS: Final = 5
"""How often in a row the files may be swapped while they are read."""
_SHOULD_BE: Final = "it should hold the pod's labels attempt, node-rank and nodes (a downward API volume)"


class AssignmentError(UserError):
    """The files do not say a place in a gang; the message names the one, and what it must be."""


def read_assignment(folder: Path) -> Assignment:
    """What the folder says now. Raises AssignmentError if it is not all there or makes no sense."""
    for _ in range(_SWAPS):
        data = _resolved(folder)
        try:
            texts = {name: (data / name).read_text().strip() for name in ("attempt", "node-rank", "nodes")}
        except FileNotFoundError as error:
            if data != _resolved(folder):
                continue  # swapped meanwhile, and the old files are gone
            raise AssignmentError(f"{folder} lacks the file {Path(error.filename).name}: {_SHOULD_BE}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise AssignmentError(f"{folder} cannot be read: {error}") from error
        return _parsed(folder, texts)
    raise AssignmentError(f"{folder} changed {_SWAPS} times while it was read")


class AssignmentWatch:
    """What the folder says, read anew at every look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problem: str | None = None
        """Why the last look found nothing, if it did not."""

    def look(self) -> Assignment | None:
        """None where the files make no sense: a label that was edited by hand must not end training."""
        try:
            found = read_assignment(self._folder)
        except AssignmentError as error:
            self.problem = str(error)
            return None
        self.problem = None
        return found


def _resolved(folder: Path) -> Path:
    try:
        return folder / (folder / _LINK).readlink()
    except OSError:  # no kubelet wrote it
        return folder


def _parsed(folder: Path, texts: dict[str, str]) -> Assignment:
    nodes = _number(folder, "nodes", texts["nodes"], 1, MAX_NODES)
    rank = texts["node-rank"]
    return Assignment(
        attempt=_number(folder, "attempt", texts["attempt"], 0, MAX_ATTEMPT),
        node_rank=None if rank == SPARE else _number(folder, "node-rank", rank, 0, nodes - 1),
        nodes=nodes,
    )


def _number(folder: Path, name: str, text: str, low: int, high: int) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else None
    if value is None or not low <= value <= high:
        other = f", or {SPARE}" if name == "node-rank" else ""
        raise AssignmentError(f"{folder}/{name} is {text!r}: it must be a whole number from {low} to {high}{other}")
    return value
