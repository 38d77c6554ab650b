"""`ddpjob` as a person runs it, on this machine or against the cluster of a kubeconfig."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from click.testing import Result
from tests.support.local_run import environment
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.forked.start import forked
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app

COMMAND = (sys.executable, "-m", "ddpjob_operator.cli.main")
IMPORTED = ("ddpjob_operator.cli.on_cluster", "ddpjob_operator.cli.submission", "ddpjob_operator.cli.why")
"""With which a forked command begins: most of what any command imports."""


def beside() -> list[str]:
    """`ddpjob` in a process of its own, for a tenth of what a new one costs: it is forked, and has no standard input.
    Its environment has to say where our packages are, as that of `to_cluster` does. The conftest of the tests that use
    it ends the process which it is forked from (`start.stop`).
    """
    return forked(*COMMAND[1:], imported=IMPORTED)


def to_cluster(kubeconfig: Path) -> dict[str, str]:
    """The environment of a command that asks that cluster."""
    return environment() | {"KUBECONFIG": str(kubeconfig)}


def ddpjob(kubeconfig: Path | None, *arguments: str, check: bool = True) -> Result:
    """Run it to its end in this process, which costs a tenth of one of its own. One at a time: it has the output."""
    aside = ThreadPoolExecutor(1)
    try:
        with patch.dict(os.environ, {} if kubeconfig is None else {"KUBECONFIG": str(kubeconfig)}):
            done = aside.submit(CliRunner().invoke, app, arguments).result(PATIENCE_SECONDS)
    finally:
        aside.shutdown(wait=False)
    assert done.exit_code == 0 or not check, done.output
    return done
