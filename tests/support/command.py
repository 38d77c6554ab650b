"""`ddpjob` as a person runs it, against the cluster of a kubeconfig."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "ddpjob_operator.cli.main")


def to_cluster(kubeconfig: Path) -> dict[str, str]:
    """The environment of a command that asks that cluster."""
    return os.environ | {"KUBECONFIG": str(kubeconfig)}


def ddpjob(kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Raises:
        CalledProcessError: it refused or failed; what it said is a note of it.
    """
    try:
        return subprocess.run(
            [*COMMAND, *arguments], env=to_cluster(kubeconfig), capture_output=True, text=True, timeout=120, check=True
        )
    except subprocess.CalledProcessError as error:
        error.add_note(error.stdout + error.stderr)
        raise
