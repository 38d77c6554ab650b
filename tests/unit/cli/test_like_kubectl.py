"""What kubectl has too: -f, -o, and options that stand before the verb."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tests.unit.answers import Server, ok
from typer.testing import CliRunner

from ddpjob_operator.cli import jobs, on_cluster, run
from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import GlobalOptions
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.submit.job import Submission

JOB = """\
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: digits}
spec: {nodes: 2}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("print(1)")
    return tmp_path


@pytest.fixture
def ran(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """What `ddpjob run` would have run."""
    found: list[Submission] = []

    def keep(submission: Submission, *_: Any) -> int:
        found.append(submission)
        return 0

    monkeypatch.setattr(run, "run", keep)
    return found


@pytest.mark.parametrize(
    ("arguments", "name", "args"),
    [
        (["job.yaml"], "digits", None),
        (["-f", "job.yaml"], "digits", None),
        (["--filename=job.yaml"], "digits", None),
        (["train.py", "--", "-f", "x", "--", "y"], "train", ["-f", "x", "--", "y"]),
        (["-f", "train.py", "--", "--lr", "1"], "train", ["--lr", "1"]),
        (["train.py", "3", "--", "--lr"], "train", ["3", "--lr"]),
    ],
)
def test_the_file_is_an_argument_or_an_option(
    ran: list[Submission], arguments: list[str], name: str, args: list[str] | None
) -> None:
    done = CliRunner().invoke(app, ["run", *arguments])
    assert (done.exit_code, done.output) == (0, "")
    (submission,) = ran
    assert (submission.job.name, submission.content["spec"].get("args")) == (name, args)


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py", "-f", "job.yaml"], "FILE, -f: train.py and job.yaml are both given; leave out one of them"),
        ([], "FILE: is not given; name a YAML file with a DDPJob, or a Python script"),
    ],
)
def test_two_files_and_none_are_one_clear_error(here: Path, verb: str, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [verb, *arguments])
    assert (done.exit_code, done.output) == (2, f"error: {said}\n")


@pytest.fixture
def api(server: Server, client: Client, here: Path) -> dict[str, Any]:
    """An API server, and the job that it creates."""
    created: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            missing = {"kind": "Status", "reason": "NotFound", "details": {"name": request.path.rpartition("/")[2]}}
            return web.json_response(missing, status=404)
        body = await request.json()
        if request.method == "POST" and "dryRun" not in request.query and request.path.endswith("/ddpjobs"):
            body["metadata"] |= {"uid": "u", "managedFields": []}
            created.update(body)
        return ok(body)

    server.answers = [answer]
    return created


async def submit(*arguments: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["submit", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_the_created_object_is_printed_and_nothing_else(
    api: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert await submit("-f", "job.yaml", "-o", "name") == "ddpjob.training.ddpjob.io/digits\n"
    annotations = {"training.ddpjob.io/owner": "ada"}
    created = {**api, "metadata": {"name": "digits", "namespace": "default", "uid": "u", "annotations": annotations}}
    assert json.loads(await submit("-f", "job.yaml", "-o", "json")) == created
    assert yaml.safe_load(await submit("train.py", "-o", "yaml"))["spec"]["entrypoint"] == {"script": "train.py"}


async def test_a_dry_run_prints_in_that_form_too(api: dict[str, Any]) -> None:
    assert await submit("job.yaml", "--dry-run", "-o", "name") == "ddpjob.training.ddpjob.io/digits\n"
    assert json.loads(await submit("job.yaml", "--dry-run", "-o", "json")) == yaml.safe_load(JOB)
    assert yaml.safe_load(await submit("job.yaml", "--dry-run")) == yaml.safe_load(JOB)
    assert api == {}


@pytest.mark.parametrize(
    ("arguments", "cluster"),
    [
        (["get", "a"], Cluster()),
        (["-n", "team", "get", "a"], Cluster(None, "team")),
        (["--namespace=team", "--context", "prod", "get", "a"], Cluster("prod", "team")),
        (["-n", "team", "get", "a", "-n", "other"], Cluster(None, "other")),
        (["--context", "prod", "get", "--context=test", "a"], Cluster("test")),
    ],
)
def test_an_option_before_the_verb_is_its_default(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], cluster: Cluster
) -> None:
    asked: list[Cluster] = []
    monkeypatch.setattr(jobs, "asked", lambda cluster, ask: asked.append(cluster) or 0)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert asked == [cluster]


def test_it_reaches_the_verbs_of_a_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpjob_operator.cli import snapshots

    asked: list[Cluster] = []
    monkeypatch.setattr(snapshots, "asked", lambda cluster, ask: asked.append(cluster) or 0)
    assert CliRunner().invoke(app, ["-n", "team", "snapshots", "ls", "a"]).exit_code == 0
    assert asked == [Cluster(None, "team")]


def test_another_kubeconfig_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "of-the-shell")
    monkeypatch.setattr(GlobalOptions, "kubeconfig", None)
    file = str(tmp_path / "mine")
    done = CliRunner().invoke(app, ["--kubeconfig", file, "ls"])
    assert (done.exit_code, os.environ["KUBECONFIG"]) == (on_cluster.REFUSED, file)
    assert done.output == f"error: cannot use the kubeconfig {file}: there is no such file\n"
    copied = Cluster("prod").command("logs", "-f", "a", namespace="x", default="x")
    assert copied == f"ddpjob --kubeconfig {file} logs -f a --context prod"
