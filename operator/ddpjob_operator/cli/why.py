"""`ddpjob why`: the answer for a job on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from ddpjob_operator.cli.folder import print_answer
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import REFUSED, SUCCEEDED, Output
from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.why import why
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.runtime.client import Client

_DEFAULT_FOLDER = Path("shared")
"""Of `ddpjob run`."""


def explain_on_cluster(cluster: Cluster, name: str, output: Output = Output.TEXT) -> int:
    """Print why the job is where it is. Where the cluster does not say, name a run of that name on this machine."""

    async def ask(client: Client, namespace: str) -> int:
        print_answer(why(await see(client, namespace, name)), output)
        return SUCCEEDED

    code = asked(cluster, ask)
    if code == REFUSED and Shared(_DEFAULT_FOLDER.resolve()).has(name):
        print(f"ddpjob run had a job {name} here: ddpjob why {name} --shared {_DEFAULT_FOLDER}", file=sys.stderr)
    return code
