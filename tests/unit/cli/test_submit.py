"""What `ddpjob submit` says at the end, whatever it could not ask meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ddpjob import DDPJob
from ddpjob_operator.cli import submit
from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.follow.lines import Line
from ddpjob_operator.follow.why import Answer
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.submit.send import Sent


class Flaky:
    """A job on an API server that does not answer the first time it is asked why."""

    asked = asyncio.Event()

    async def why(self) -> Answer:
        if not self.asked.is_set():
            self.asked.set()
            raise ApiError(0, "Timeout", "no answer within 15 s")
        return Answer("train: Succeeded 0s ago", ())

    async def all_logs(self, wanted: Any) -> Flaky:
        return self

    async def follow(self, say: Callable[[Line], None], note: Callable[[str], None]) -> bool:
        await self.asked.wait()
        say(Line("", 0, 0, "step 1"))
        return True


async def test_a_question_that_was_not_answered_does_not_change_how_the_job_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_SECONDS_UNTIL_WHY", 0.0)
    job: Any = Flaky()
    assert await submit._follow(job) == 0
    assert capsys.readouterr().out.splitlines() == ["[rank 0] step 1", "train: Succeeded 0s ago"]


class Waiting:
    """A job whose pod waits, first for a name and then for a node."""

    def __init__(self) -> None:
        self.headlines = iter(("2s: NameTaken", "7s: NameTaken", "1m 2s: NameTaken", "1m 7s: Unschedulable"))

    async def why(self) -> Answer:
        if (what := next(self.headlines, None)) is None:
            raise asyncio.CancelledError
        return Answer(f"train: Starting for {what}: pod train-0-0", ())


async def test_what_a_job_waits_for_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_SECONDS_UNTIL_WHY", 0.0)
    waiting: Any = Waiting()
    with pytest.raises(asyncio.CancelledError):
        await submit._say_why_it_waits(waiting)
    assert capsys.readouterr().err.splitlines() == [
        "ddpjob: train: Starting for 2s: NameTaken: pod train-0-0",
        "ddpjob: train: Starting for 1m 7s: Unschedulable: pod train-0-0",
    ]


def test_each_link_becomes_an_annotation_and_one_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    command = ["submit", "train.py", "--dry-run", "--link", "wandb=https://wandb.ai/x", "--link"]
    done = CliRunner().invoke(app, [*command, "mlflow=http://mlflow.example/#/runs?a=b"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["metadata"]["annotations"] == {
        "links.training.ddpjob.io/wandb": "https://wandb.ai/x",
        "links.training.ddpjob.io/mlflow": "http://mlflow.example/#/runs?a=b",
    }
    done = CliRunner().invoke(app, [*command, "mlflow=mlflow.example"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --link mlflow=mlflow.example: this is no URL that begins with http:// or https://; write one, without "
        "a user, a space or a character that is not ASCII in it\n"
    )


def test_an_owner_is_in_what_a_dry_run_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    done = CliRunner().invoke(app, ["submit", "train.py", "--dry-run", "--owner", "ada@example.org"])
    assert yaml.safe_load(done.stdout)["metadata"]["annotations"] == {"training.ddpjob.io/owner": "ada@example.org"}
    done = CliRunner().invoke(app, ["submit", "train.py", "--dry-run", "--owner", "x" * 65])
    assert (done.exit_code, done.stderr) == (2, "error: --owner: has 65 characters; write at most 64\n")


def interrupted(cluster: Cluster, ask: Callable[[Any, str], Awaitable[int]]) -> int:
    """As `asked`, on a cluster whose kubeconfig names the namespace `default`."""

    async def connected() -> int:
        return await ask(SimpleNamespace(namespace="default"), cluster.namespace or "default")

    try:
        return asyncio.run(connected())
    except asyncio.CancelledError:
        return 130


@pytest.mark.parametrize(
    ("cluster", "in_the_file", "options"),
    [
        (Cluster(), None, ""),
        (Cluster(), "team", " -n team"),
        (Cluster(None, "team"), None, " -n team"),
        (Cluster(None, "default"), "team", ""),
        (Cluster("prod"), "team", " -n team --context prod"),
        (Cluster(""), None, ""),
    ],
)
def test_ctrl_c_says_what_is_there_and_a_command_that_asks_the_same_cluster(
    cluster: Cluster,
    in_the_file: str | None,
    options: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job that was still being sent was said to go on, and the command asked another namespace."""

    async def stop(*_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError

    async def sent(*_: Any, **__: Any) -> Sent:
        return Sent({"metadata": {"uid": "u"}}, 0, None)

    (tmp_path / "train.py").write_text("print(1)")
    submission = DDPJob(script="train.py", folder=tmp_path).submission()
    if in_the_file is not None:
        metadata = {**submission.content["metadata"], "namespace": in_the_file}
        submission = replace(submission, content={**submission.content, "metadata": metadata})
    monkeypatch.setattr(submit, "asked", interrupted)

    def last_line(*, detach: bool) -> str:
        submit.submit(cluster, submission, replace=False, detach=detach)
        return capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setattr(submit, "send", stop)
    said = f"stopped while train was sent; ddpjob get train{options} says whether it is there"
    assert last_line(detach=False) == said
    monkeypatch.setattr(submit, "send", sent)
    monkeypatch.setattr(submit, "_follow", stop)
    assert last_line(detach=False) == f"train goes on; ddpjob logs -f train{options} shows its output again"
    shown = f"ddpjob logs -f train{options} shows its output, ddpjob watch train{options} its progress"
    assert last_line(detach=True) == shown
