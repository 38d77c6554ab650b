"""A pod's place in the gang as files that it can read, in the way of the kubelet (docs/contracts.md section 2)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ddpjob_operator.core.values.names import SPARE

_LINK = "..data"


def write_assignment(folder: Path, attempt: int, node_rank: int | None, nodes: int) -> None:
    """Replace what `folder` says, all of it at once: a reader that follows `..data` once sees files of one moment.

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    rank = SPARE if node_rank is None else str(node_rank)
    for name, value in (("attempt", str(attempt)), ("node-rank", rank), ("nodes", str(nodes))):
        (data / name).write_text(value)
    link = folder / _LINK
    before = link.readlink() if link.is_symlink() else None
    new = folder / f"{_LINK}_tmp"
    new.symlink_to(data.name)
    new.replace(link)
    if before is not None:
        shutil.rmtree(folder / before, ignore_errors=True)
