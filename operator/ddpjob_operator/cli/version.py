"""`ddpjob version`: that of this command, and those of the operators in the cluster."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import yaml

from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import SUCCEEDED, Output
from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.follow.versions import OperatorVersion, operator_versions
from ddpjob_operator.runtime.client import connect
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import CLI
from ddpjob_operator.settings import VERSION

SECONDS = 10.0
"""How long the cluster may take to answer: who asks for a version often has none."""


def show_version(cluster: Cluster, output: Output, *, client_only: bool) -> int:
    """Print them. A cluster that cannot be asked is said, and is no failure."""
    found, problem = ([], "") if client_only else asyncio.run(_operators(cluster))
    if output is Output.TEXT:
        print("\n".join(_lines(found, problem, client_only=client_only)))
        return SUCCEEDED
    answer: dict[str, Any] = {"clientVersion": VERSION}
    if not client_only:
        answer |= {"operators": [asdict(item) for item in found]}
    if problem:
        answer |= {"problem": problem}
    text = json.dumps(answer, indent=2) if output is Output.JSON else yaml.safe_dump(answer, sort_keys=False).rstrip()
    print(text)
    return SUCCEEDED


async def _operators(cluster: Cluster) -> tuple[list[OperatorVersion], str]:
    """Or why they are not known."""
    try:
        async with asyncio.timeout(SECONDS):
            client = await connect(context=cluster.context, agent=CLI)
            try:
                return await operator_versions(client), ""
            finally:
                await client.close()
    except TimeoutError:
        return [], f"the cluster has not answered within {SECONDS:.0f} s"
    except ApiError as error:
        return [], error.message if error.status == 403 else in_words(error)


def _lines(found: list[OperatorVersion], problem: str, *, client_only: bool) -> list[str]:
    lines = [f"Client Version: {VERSION}"]
    if client_only:
        return lines
    if problem:
        return [*lines, f"Operator Version: unknown: {problem}"]
    if not found:
        return [*lines, "Operator Version: none: the cluster has no Deployment of ddpjob-operator"]
    return [*lines, *(f"Operator Version: {item.version} ({item.namespace}/{item.name})" for item in found)]
