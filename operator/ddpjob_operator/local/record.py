"""The status of a run on this machine, on the shared folder: what a cluster has in its API server.

`ddpjob run` writes it at every change, so that phase, failures and goodput can be read during the run and after it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpjob_operator.core.values.job import Job

VERSION = 1


def status_file(shared: Path, job: str) -> Path:
    return shared / "logs" / job / "status.json"


class StatusFile:
    """Rewrites the file when the status has changed. A folder that is full or away does not stop the run."""

    def __init__(self, shared: Path, job: Job) -> None:
        self._path = status_file(shared, job.name)
        self._created = datetime.now(UTC)
        self._written: dict[str, Any] | None = None

    def write(self, job: Job) -> None:
        status = job.status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"internal"})
        if status == self._written:
            return
        content = {
            "version": VERSION,
            "job": job.name,
            "uid": job.uid,
            "created": self._created.isoformat(),
            "nodes": job.spec.nodes,
            "procsPerNode": job.spec.ranks_per_node,
            "status": status,
        }
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self._path)
            self._written = status
