"""The commands that ask a cluster: connect, ask, print; refusals as one line that says what to do."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ddpjob.handle import AsyncJob
from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.terminal import numbered
from ddpjob_operator.follow.logs import Line
from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.follow.watch import watch
from ddpjob_operator.follow.why import why
from ddpjob_operator.local.display import display_for
from ddpjob_operator.local.observed import success_in_words
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import CLI

SUCCEEDED, FAILED, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which cluster and namespace a command asks; None is what the kubeconfig says."""

    context: str | None = None
    namespace: str | None = None


def show_watch(cluster: Cluster, name: str) -> int:
    """Show the job until it has ended; 0 if it has succeeded, 1 if it failed."""

    async def ask(client: Client, namespace: str) -> int:
        with display_for(sys.stdout) as display:
            status = await watch(client, namespace, name, display)
        if status.phase is Phase.SUCCEEDED:
            print(success_in_words(status))
            return SUCCEEDED
        print(why(await see(client, namespace, name)).text(), file=sys.stderr)
        return FAILED

    return asked(cluster, ask, interrupted=f"{name} goes on; ddpjob watch {name} shows it again")


def change(cluster: Cluster, name: str, spec: dict[str, object], done: str) -> int:
    """Change fields of a job's spec, as `kubectl patch` does, and print what follows from it."""

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

    try:
        return asyncio.run(connected())
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted)
        return 130
    except ApiError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return REFUSED


def print_line(line: Line) -> None:
    """On a terminal each rank has a colour."""
    print(f"{numbered(f'[rank {line.rank}]', line.rank)} {line.text}", flush=True)


def print_note(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)


def seconds(text: str) -> int:
    """Seconds of such as `90s`, `10m`, `1h30m` (Go's time.ParseDuration, whole units).

    Raises:
        ValueError: it is none; the message says how to write one.
    """
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or found is None:
        raise ValueError(f"{text!r} is not a duration; write one such as 90s, 10m or 1h30m")
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + rest
