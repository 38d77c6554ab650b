"""A cluster for tests, demos and benchmarks: one that is there already, or one for the block alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPTS = Path(__file__).parent / "cluster"
EXIT_IMPOSSIBLE = 3
"""Exit code of cluster.sh and images.sh where this machine lacks something that they cannot provide."""


class Impossible(Exception):
    """No cluster, or no images for it, can be had on this machine; the message says what is missing."""


def script(name: str, *args: str) -> str:
    """Standard output of a script of tests/cluster; its progress messages go to stderr.

    Raises Impossible, or RuntimeError with the end of those messages.
    """
    done = subprocess.run([SCRIPTS / name, *args], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode == EXIT_IMPOSSIBLE:
        raise Impossible(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(args)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


@contextmanager
def cluster_running(*options: str) -> Iterator[tuple[Path, bool]]:
    """Start the cluster, or find it running, and stop it at the end of the block if it was not there before.

    Yields the path of its kubeconfig, and whether the cluster ends with the block. A cluster that is started here also
    ends when this process dies: nothing is left over by a SIGKILL. Raises Impossible where none is to be had.
    """
    status = subprocess.run([SCRIPTS / "cluster.sh", "status", *options], capture_output=True)
    ours = status.returncode != 0
    try:
        up = script("cluster.sh", "up", *options, "--until-end-of", str(os.getpid()))
        yield Path(up.removeprefix("KUBECONFIG=").strip()), ours
    finally:
        if ours and status.returncode != EXIT_IMPOSSIBLE:
            script("cluster.sh", "down", *options)
