"""`ddpjob events`: what happened to a job, its pods and its claim, in the words of Kubernetes and of the operator."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime

import yaml

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED, Output
from ddpjob_operator.cli.reader import while_read
from ddpjob_operator.cli.terminal import Style, print_note, styled, width
from ddpjob_operator.follow.events import Happened, follow_events, read_happened
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.follow.table import wrapped
from ddpjob_operator.runtime.client import Client

_INDENT = " " * len("12:00:06Z ")


def show_events(cluster: Cluster, name: str, follow: bool, output: Output) -> int:
    """Print the events that there are or, with `follow`, print them until the job has ended."""
    say = {Output.TEXT: _say, Output.JSON: _say_json, Output.YAML: _say_yaml}[output]

    async def ask(client: Client, namespace: str) -> int:
        if follow:
            return SUCCEEDED if await follow_events(client, namespace, name, say, print_note) else FAILED
        found = await read_happened(client, namespace, await read_job(client, namespace, name))
        for _, happened in found:
            say(happened)
        if not found:
            print(f"the cluster has no event of {name} any more; ddpjob why {name} reads its status", file=sys.stderr)
        return SUCCEEDED

    return asked(cluster, while_read(ask))


def _say(happened: Happened) -> None:
    text = "\n".join(wrapped([happened.line(datetime.now(UTC))], width(), _INDENT))
    print(styled(text, Style.YELLOW) if happened.warning else text, flush=True)


def _say_json(happened: Happened) -> None:
    print(json.dumps(_object(happened)), flush=True)


def _say_yaml(happened: Happened) -> None:
    """An item of a list, which the items make together."""
    print(yaml.safe_dump([_object(happened)], sort_keys=False, allow_unicode=True), end="", flush=True)


def _object(happened: Happened) -> dict[str, object]:
    return asdict(happened) | {"time": happened.time.isoformat()}
