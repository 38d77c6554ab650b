"""`ddpjob run` and its pods in processes that are forked with torch imported (tests/trainer/forked).

To import torch is most of what a small job costs: a second for each agent, three for each rank. The tree is what
`ddpjob run` starts otherwise: the runner, `container.py` for each pod, and below it launcher, agent and ranks.

    forked_run.py ASKED ANSWERED    what `outcome` has a process run
"""

from __future__ import annotations

import asyncio
import io
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import local_run
from tests.trainer.forked.start import PACKAGES, RUNS, Forked

from ddpjob_operator.core.values.job import Job
from ddpjob_operator.local import children
from ddpjob_operator.local.display import PlainDisplay
from ddpjob_operator.local.processes import make_scratch
from ddpjob_operator.local.runner import Outcome

DEADLINE = 420.0


def start(arguments: list[str], folder: Path, output: int) -> Forked:
    """`ddpjob run` with these arguments, in a folder."""
    command = ["-m", "ddpjob_operator.cli.main", "run", *arguments]
    return Forked(command, local_run.environment(), output, imported=RUNS, folder=folder)


def outcome(job: Job, shared: Path, *, chaos: str | None = None, environ: dict[str, str] | None = None) -> Outcome:
    """What `local_run.run` returns in a process of its own, once nothing of the job is left: no scratch folder of its
    pods, either.
    """
    with tempfile.TemporaryDirectory() as name:
        asked, answered, said = (Path(name, file) for file in ("asked", "answered", "said"))
        asked.write_bytes(pickle.dumps((job, shared, chaos, environ or local_run.environment())))
        with said.open("wb") as output:
            command = ["-m", "tests.support.forked_run", str(asked), str(answered)]
            process = Forked(command, local_run.environment(PACKAGES), output.fileno(), imported=RUNS)
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert code == 0, said.read_text()
        found = pickle.loads(answered.read_bytes())
        assert isinstance(found, Outcome)
        return found


def _main(asked: str, answered: str) -> None:
    job, shared, chaos, environ = pickle.loads(Path(asked).read_bytes())
    display = PlainDisplay(io.StringIO())
    scratch: list[Path] = []

    def recorded(pod: str) -> Path:
        scratch.append(make_scratch(pod))
        return scratch[-1]

    children.make_scratch = recorded
    found = asyncio.run(local_run.run(job, shared, display, chaos=chaos, environ=environ))
    assert scratch
    assert [folder for folder in scratch if folder.exists()] == []
    Path(answered).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
