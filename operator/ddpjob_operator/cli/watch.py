"""`ddpjob watch`: how far a job on a cluster is, until it has ended."""

from __future__ import annotations

import asyncio
import sys

from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED
from ddpjob_operator.cli.reader import while_read
from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.watch import watch
from ddpjob_operator.follow.why import why
from ddpjob_operator.local.display import display_for
from ddpjob_operator.local.observed import success_in_words
from ddpjob_operator.runtime.client import Client


def show_watch(cluster: Cluster, name: str) -> int:
    """Show the job until it has ended; 0 if it has succeeded, 1 if it failed."""

    async def ask(client: Client, namespace: str) -> int:
        try:
            with display_for(sys.stdout) as display:
                status = await watch(client, namespace, name, display)
        except asyncio.CancelledError:  # Ctrl-C
            again = cluster.command("watch", name, namespace=namespace, default=client.namespace)
            print(f"{name} goes on; {again} shows it again")
            raise
        if status.phase is Phase.SUCCEEDED:
            print(success_in_words(status))
            return SUCCEEDED
        print(why(await see(client, namespace, name)).text(), file=sys.stderr)
        return FAILED

    return asked(cluster, while_read(ask))
