"""`ddpjob why`: the answer for a job on a cluster, or for one in the folder of `ddpjob run`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ddpjob_operator.cli.on_cluster import REFUSED, SUCCEEDED, Cluster, asked
from ddpjob_operator.cli.parameters import Output
from ddpjob_operator.follow.read import see
from ddpjob_operator.follow.why import Answer, why
from ddpjob_operator.page.folder import answer_of, reports_of
from ddpjob_operator.page.records import record_of
from ddpjob_operator.page.shared import Shared
from ddpjob_operator.runtime.client import Client

_DEFAULT_FOLDER = Path("shared")
"""Of `ddpjob run`."""


def explain_on_cluster(cluster: Cluster, name: str, output: Output = Output.TEXT) -> int:
    """Print why the job is where it is. Where the cluster does not say, name a run of that name on this machine."""

    async def ask(client: Client, namespace: str) -> int:
        _print(why(await see(client, namespace, name)), output)
        return SUCCEEDED

    code = asked(cluster, ask)
    if code == REFUSED and Shared(_DEFAULT_FOLDER.resolve()).has(name):
        print(f"ddpjob run had a job {name} here: ddpjob why {name} --shared {_DEFAULT_FOLDER}", file=sys.stderr)
    return code


def explain_in_folder(folder: Path, name: str, output: Output = Output.TEXT) -> int:
    """The same of a job in the folder of `ddpjob run`, or in a mounted volume."""
    shared = job_in(folder, name)
    if shared is None:
        return REFUSED
    job = record_of(shared, name)
    _print(answer_of(job, datetime.now(UTC), reports_of(shared, job)), output)
    return SUCCEEDED


def job_in(folder: Path, name: str) -> Shared | None:
    """The folder, if it has such a job; else one line says which it has."""
    shared = Shared(folder.expanduser().resolve())
    if shared.has(name):
        return shared
    known = ", ".join(shared.job_names()) or "none"
    print(f"error: --shared {folder}: no job {name} there; jobs: {known}", file=sys.stderr)
    return None


def _print(answer: Answer, output: Output) -> None:
    if output is Output.TEXT:
        print(answer.text())
    elif output is Output.JSON:
        print(json.dumps(asdict(answer), indent=2))
    else:
        print(yaml.safe_dump(json.loads(json.dumps(asdict(answer))), sort_keys=False, allow_unicode=True), end="")
