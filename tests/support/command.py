"""`ddpjob` as a person runs it, against the cluster of a kubeconfig."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from click.testing import Result
from tests.support.waiting import PATIENCE_SECONDS
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app

COMMAND = (sys.executable, "-m", "ddpjob_operator.cli.main")


def to_cluster(kubeconfig: Path) -> dict[str, str]:
    """The environment of a command that asks that cluster."""
    return os.environ | {"KUBECONFIG": str(kubeconfig)}


def ddpjob(kubeconfig: Path, *arguments: str) -> Result:
    """Run it to its end in this process, which costs a tenth of one of its own. One at a time: it has the output."""
    aside = ThreadPoolExecutor(1)
    try:
        with patch.dict(os.environ, {"KUBECONFIG": str(kubeconfig)}):
            done = aside.submit(CliRunner().invoke, app, arguments).result(PATIENCE_SECONDS)
    finally:
        aside.shutdown(wait=False)
    assert done.exit_code == 0, done.output
    return done
