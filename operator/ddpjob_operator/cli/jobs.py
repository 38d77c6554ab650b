"""`ddpjob ls` and `ddpjob get`: DDPJobs as a table, in words, or as the objects that they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import SUCCEEDED, Form
from ddpjob_operator.cli.terminal import Style, styled, width
from ddpjob_operator.cluster import paths
from ddpjob_operator.follow.jobs import job_table, newest_first, summary_lines
from ddpjob_operator.follow.read import read_job
from ddpjob_operator.runtime.client import Client, Json
from ddpjob_operator.submit.kubectl_yaml import dump

_NAME = "ddpjob.training.ddpjob.io"
"""How kubectl names the kind in `-o name`."""


def show_list(cluster: Cluster, everywhere: bool, form: Form | None) -> int:
    """Print the jobs of a namespace, or of all."""

    async def ask(client: Client, namespace: str) -> int:
        found, _ = await client.list(paths.jobs(None if everywhere else namespace), "ddpjobs")
        jobs = newest_first(found)
        whole = {"apiVersion": "v1", "kind": "List", "items": [_object(job) for job in jobs]}
        if form in (Form.JSON, Form.YAML):
            _print(whole, form)
        elif not jobs:
            _say_there_is_none(None if everywhere else namespace)
        else:
            _print_jobs(jobs, form, namespaces=everywhere)
        return SUCCEEDED

    return asked(cluster, ask)


def show_job(cluster: Cluster, name: str, form: Form | None) -> int:
    """Print one job."""

    async def ask(client: Client, namespace: str) -> int:
        job = await read_job(client, namespace, name)
        if form is Form.WIDE:
            _print_jobs([job], form, namespaces=False)
        elif form is not None:
            print_object(job, form)
        else:
            headline, *lines = summary_lines(job, datetime.now(UTC), width())
            print("\n".join((styled(headline, Style.BOLD), *lines)))
        return SUCCEEDED

    return asked(cluster, ask)


def print_object(job: Json, form: Form) -> None:
    """Print one job as JSON, as YAML or by its name, as kubectl does."""
    if form is Form.NAME:
        print(f"{_NAME}/{job['metadata']['name']}")
    else:
        _print(_object(job), form)


def _print_jobs(jobs: Sequence[Json], form: Form | None, *, namespaces: bool) -> None:
    if form is Form.NAME:
        for job in jobs:
            print_object(job, form)
        return
    wide = form is Form.WIDE
    heading, rows = job_table(jobs, datetime.now(UTC), wide=wide, namespaces=namespaces, width=width())
    print(heading)
    for row in rows:
        print(styled(row.line, Style.DIM) if row.over else row.line)


def _object(job: Json) -> Json:
    """Items of a list lack what a single object has; managedFields are for servers."""
    metadata = {name: value for name, value in job["metadata"].items() if name != "managedFields"}
    return {"apiVersion": API_VERSION, "kind": KIND, **job, "metadata": metadata}


def _print(found: Json, form: Form) -> None:
    if form is Form.JSON:
        print(json.dumps(found, indent=2))
    else:
        print(dump(found), end="")


def _say_there_is_none(namespace: str | None) -> None:
    if namespace is None:
        text = "there is no DDPJob in this cluster; kubectl apply -f job.yaml makes one"
    else:
        text = f"there is no DDPJob in namespace {namespace}; see all namespaces with -A, or name one with -n"
    print(text, file=sys.stderr)
