"""`ddpjob code`: the code of a job in a folder, which is no part of what is submitted next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from tests.unit.answers import Server, ok

from ddpjob import DDPJob
from ddpjob_operator.cli.code import get_code
from ddpjob_operator.cli.documents import BadFile
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.submission import Given, read_given
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.submit.config_maps import config_map


@pytest.fixture
async def fetched(server: Server, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A project with the code of its job in the folder that the command takes by default, and the digest of that."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    (project / ".gitignore").write_text("*.log\n")
    monkeypatch.chdir(project)
    submission = DDPJob(script="train.py").submission()
    assert submission.code is not None
    parts = {f"configmaps/{made['metadata']['name']}": made for made in map(config_map, submission.code.parts)}

    async def answer(request: web.Request) -> web.StreamResponse:
        return ok(next((made for name, made in parts.items() if request.path.endswith(name)), submission.content))

    server.answers = [answer]
    assert await asyncio.to_thread(get_code, Cluster(namespace="default"), "train", Path("train-code")) == 0
    return project, submission.code.sha256


async def test_submitted_again_the_folder_around_it_has_the_same_digest(fetched: tuple[Path, str]) -> None:
    project, sha256 = fetched
    assert (project / "train-code" / "train.py").read_text() == "print(1)"
    assert DDPJob(script="train.py").submission().content["spec"]["code"]["sha256"] == sha256


async def test_it_can_be_submitted_from_itself(fetched: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    project, sha256 = fetched
    monkeypatch.chdir(project / "train-code")
    assert DDPJob(script="train.py").submission().content["spec"]["code"]["sha256"] == sha256


async def test_a_script_in_it_is_refused_with_the_folder_to_submit_from(fetched: tuple[Path, str]) -> None:
    with pytest.raises(BadFile, match="because `ddpjob code` wrote train-code; submit from that folder"):
        read_given(Given("train-code/train.py"))


async def test_a_folder_that_cannot_be_made_is_named(
    fetched: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(get_code, Cluster(namespace="default"), "train", Path("train.py/code")) == 2
    assert capsys.readouterr().err == "error: train.py: File exists; name a folder that you may write to with --to\n"
