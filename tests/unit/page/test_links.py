"""Links to other tools: those of a setting, those of a job, and none that would do anything but lead there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.page.conftest import Folder
from tests.unit.page.test_cluster import ApiServer, item, source
from tests.unit.page.test_server import Document

from ddpjob_operator.cli.main import app
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.links import parse_template
from ddpjob_operator.page.server import make_app
from ddpjob_operator.wire.links import ANNOTATION_PREFIX, Link

DOCUMENT = Path(__file__).parents[3] / "docs/dashboard.md"
GRAFANA = "Grafana=https://grafana.example.com/d/job?var-namespace={namespace}&var-ddpjob={name}"


def test_a_template_gets_the_values_of_the_job_quoted() -> None:
    template = parse_template(GRAFANA)
    assert template.of("team", "a&b=/{uid}#x", "") == Link(
        "Grafana",
        "https://grafana.example.com/d/job?var-namespace=team&var-ddpjob=a%26b%3D%2F%7Buid%7D%23x",
        "grafana.example.com",
    )
    assert parse_template("W&B=https://wandb.ai/team?run={uid}").of("team", "digits", "") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://example.com", "write TITLE=URL"),
        ("<b>=https://example.com", "write TITLE=URL"),
        ("a=javascript:alert(1)", "http:// or https://"),
        ("a=https://example.com/{job}", "{job} is unknown"),
        ("a=https://{namespace}.example.com/", "the host of a link cannot depend"),
        ("a={name}://example.com/", "http:// or https://"),
    ],
)
def test_what_is_no_template_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_template(text)
    assert message in str(refused.value)


async def test_the_page_has_both_and_nothing_in_them_is_markup() -> None:
    evil = 'https://x.example/"><script>alert(1)</script>'
    metadata = item()["metadata"] | {"annotations": {f"{ANNOTATION_PREFIX}wandb": evil}}
    made = make_app(source(ApiServer(item(metadata=metadata))), links=[parse_template(GRAFANA)])
    async with TestClient(TestServer(made)) as browser:
        text = await (await browser.get("/jobs/team/digits")).text()
    document = Document(text)
    found = [anchor for anchor in document.all("a") if anchor.get("target") == "_blank"]
    assert [anchor["href"] for anchor in found] == [
        "https://grafana.example.com/d/job?var-namespace=team&var-ddpjob=digits",
        evil,
    ]
    assert {anchor["rel"] for anchor in found} == {"noopener noreferrer"}
    assert len(document.all("script")) == 1


def test_the_links_of_the_document_lead_to_the_job_in_each_tool() -> None:
    """Also for a name with characters that would end a part of a URL, which a folder may have."""
    templates = [parse_template(text) for text in re.findall(r"--link '([^']+)'", DOCUMENT.read_text())]
    urls = {each.title: each.of("team", "digits", "u-1") for each in templates}
    assert {title: found and found.url for title, found in urls.items()} == {
        "Grafana": "https://grafana.example.com/d/ddpjob-job?var-namespace=team&var-ddpjob=digits",
        "TensorBoard": "https://tensorboard.example.com/?runFilter=%5Edigits%2F#timeseries",
        "W&B": "https://wandb.ai/TEAM/ddpjob/groups/digits",
        "MLflow": "https://mlflow.example.com/#/experiments/7/runs?searchFilter=tags.job%3D%22team%2Fdigits%22",
    }
    hostile = {each.title: each.of("a&b", "c d/e?f#g", "u-1") for each in templates}
    assert {title: found and found.url for title, found in hostile.items()} == {
        "Grafana": "https://grafana.example.com/d/ddpjob-job?var-namespace=a%26b&var-ddpjob=c%20d%2Fe%3Ff%23g",
        "TensorBoard": "https://tensorboard.example.com/?runFilter=%5Ec%20d%2Fe%3Ff%23g%2F#timeseries",
        "W&B": "https://wandb.ai/TEAM/ddpjob/groups/c%20d%2Fe%3Ff%23g",
        "MLflow": "https://mlflow.example.com/#/experiments/7/runs"
        "?searchFilter=tags.job%3D%22a%26b%2Fc%20d%2Fe%3Ff%23g%22",
    }


async def test_without_links_there_is_no_empty_list(folder: Folder) -> None:
    folder.status("digits", phase="Running")
    async with TestClient(TestServer(make_app(FolderSource.at(folder.root)))) as browser:
        assert "Other tools" not in await (await browser.get("/jobs/local/digits")).text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shared", ".", "--link", "a=javascript:alert(1)"], "--link"),
        (["--volume-of", "team/data"], "--volume-of team/data: name the folder where the volume is mounted"),
        (["--shared", "none", "--volume-of", "team/data"], "--shared none: no such folder"),
        (["--shared", ".", "--volume-of", "data"], "--volume-of data: give NAMESPACE/CLAIM"),
        (["--shared", ".", "-n", "team"], "or say with --volume-of whose volume it is"),
    ],
)
def test_the_command_refuses_options_that_cannot_be(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        typer.main.get_command(app)(["dashboard", *options], prog_name="ddpjob")
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
