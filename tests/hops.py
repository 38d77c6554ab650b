"""How many files and functions of the operator one decision passes: `python -m tests.hops`.

A mirror for whoever changes the rooms of core, and no limit. Counted are calls of functions of `core` and `api` under
`plan`: for an idle look at a healthy job, and for the look that restarts its gang after a failure.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "unit/core"))

from builders import failed, in_phase, make_job, make_pod, seen
from looks import look

from ddpjob_operator.api.status import Phase, SnapshotStatus

PACKAGE = f"{Path('ddpjob_operator')}/"


@dataclass
class Tracer:
    """Calls by file and function."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def run(self, decide: Callable[[], object]) -> str:
        sys.setprofile(self._note)
        try:
            decide()
        finally:
            sys.setprofile(None)
        files = {file for file, _ in self.calls}
        return f"{len(files)} files, {len(self.calls)} functions, {self.calls.total()} calls"

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and PACKAGE in file and not frame.f_code.co_name.startswith("<"):
            self.calls[file.partition(PACKAGE)[2], frame.f_code.co_name] += 1


def main() -> None:
    snapshot = SnapshotStatus(step=100, time=make_job().created, verified=True)
    running = make_job(in_phase(Phase.RUNNING, snapshot=snapshot))
    healthy = look(running, seen(make_pod(0), make_pod(1))).status
    job = make_job(healthy)
    stories = {
        "an idle look at a healthy job": seen(make_pod(0), make_pod(1)),
        "a look that restarts the gang": seen(make_pod(0), failed(1, 137, "WorkerKilled")),
    }
    for name, observed in stories.items():
        look(job, observed)  # imports and caches
        print(f"{name}: {Tracer().run(lambda observed=observed: look(job, observed))}")


if __name__ == "__main__":
    main()
