"""The commands that ask a cluster: connect, ask, print; refusals as one line that says what to do."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from ddpjob_operator.cli.parameters import REFUSED, SUCCEEDED, GlobalOptions
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.follow.table import visible
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import CLI

MOST_FILES = 4096
"""More than the largest job has pods, each of which is a connection where its log is followed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which cluster and namespace a command asks; None is what the kubeconfig says."""

    context: str | None = None
    namespace: str | None = None

    def command(self, *words: str, namespace: str, default: str) -> str:
        """`ddpjob` with these words, to copy: it asks the same cluster, and this namespace, which is named unless it is
        the default one of the kubeconfig.
        """
        place = () if namespace == default else ("-n", namespace)
        context = ("--context", self.context) if self.context else ()
        return shlex.join(("ddpjob", *GlobalOptions.to_copy(), *words, *place, *context))


def change(cluster: Cluster, name: str, spec: dict[str, object], done: str) -> int:
    """Change fields of a job's spec, as `kubectl patch` does, and print what follows from it."""
    from ddpjob.handle import AsyncJob  # and with it all of the client, which most commands do without

    async def ask(client: Client, namespace: str) -> int:
        await AsyncJob(client, namespace, name).change(spec)
        print(done)
        return SUCCEEDED

    return asked(cluster, ask)


def asked(cluster: Cluster, ask: Callable[[Client, str], Awaitable[int]], interrupted: str = "") -> int:
    """What `ask` returns for a client and a namespace; a refusal is one line, Ctrl-C is `interrupted` and 130."""

    async def connected() -> int:
        client = await connect(context=cluster.context, agent=CLI)
        try:
            return await ask(client, cluster.namespace or client.namespace)
        finally:
            await client.close()

    allow_files()
    try:
        return asyncio.run(connected())
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted)
        return 130
    except ApiError as error:
        said = "\n".join(map(visible, in_words(error).split("\n")))  # maybe in words of a job
        print(f"error: {said}", file=sys.stderr)
        return REFUSED


def allow_files() -> None:
    """Raise this process's limit of open files to `MOST_FILES`, as far as it may: most systems begin with 1,024, and
    some with 256.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource  # which Windows has not

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
