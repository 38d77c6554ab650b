"""The commands that ask a cluster: connect, ask, print; refusals as one line that says what to do."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ddpjob.handle import AsyncJob
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.values.observed import PodView
from ddpjob_operator.follow.logs import Line, Wanted, pods_of
from ddpjob_operator.follow.read import read_job, read_pods, see
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.follow.watch import watch
from ddpjob_operator.follow.why import why
from ddpjob_operator.local.display import display_for
from ddpjob_operator.local.observed import success_in_words
from ddpjob_operator.runtime.client import Client, connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import CLI
from ddpjob_operator.wire.jobs import parse_status
from ddpjob_operator.wire.pods import parse_pod

SUCCEEDED, FAILED, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which cluster and namespace a command asks; None is what the kubeconfig says."""

    context: str | None = None
    namespace: str | None = None


def show_logs(cluster: Cluster, name: str, wanted: Wanted, follow: bool) -> int:
    """Print what the ranks have printed or, with `follow`, print it until the job has ended."""

    async def ask(client: Client, namespace: str) -> int:
        job = await read_job(client, namespace, name)
        logs = await AsyncJob(client, namespace, name).all_logs(wanted)
        if follow:
            return SUCCEEDED if await logs.follow(print_line, print_note) else FAILED
        found = False
        async for line in logs.now(print_note):
            found = True
            print_line(line)
        if not found:
            pods = [parse_pod(pod) for pod in await read_pods(client, namespace, job)]
            _explain_silence(parse_status(job.get("status") or {}), pods_of(pods, wanted, logs.ranks_per_node), name)
        return SUCCEEDED

    return asked(cluster, ask)


def show_watch(cluster: Cluster, name: str) -> int:
    """Show the job until it has ended; the exit code is the job's."""

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
    print(line, flush=True)


def print_note(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)


def _explain_silence(status: DDPJobStatus, pods: list[PodView], name: str) -> None:
    """Where to look if no line came: the pods wait, are gone, or print nothing that is wanted."""
    if any(pod.phase != "Pending" for pod in pods):
        print_note("no line of the job's pods matches")
    elif pods or not status.is_final:
        print_note(f"no pod of the job has started; ddpjob why {name} says why")
    else:
        print_note(
            f"the pods of {name} are gone; on the job's volume, logs/{name}/pods has their logs while it is kept"
        )
        if status.last_failure is not None and status.last_failure.log_tail:
            print(status.last_failure.log_tail)


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
