"""Links to other tools: those of a setting, those of a job, and none that would do anything but lead there."""

from __future__ import annotations

import pytest
import typer
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.page.conftest import Folder
from tests.unit.page.test_cluster import ApiServer, item, source
from tests.unit.page.test_server import Document

from ddpjob_operator.cli.main import app
from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.links import ANNOTATION_PREFIX, Link, link, links_of_annotations, parse_template
from ddpjob_operator.page.server import make_app

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


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)", "JaVaScRiPt:alert(1)//https://x", " javascript:alert(1)", "java\nscript:alert(1)",
        "data:text/html,<script>alert(1)</script>", "vbscript:x", "file:///etc/passwd", "//evil.example", "/jobs/a/b",
        "https:", "https:///x", "https://", "http:\\\\evil.example", "https://good.example\\@evil.example",
        "https://good.example@evil.example/", "https://a:b@evil.example/", "https://x\u202e.example", "https://x y/",
        "https://x\t/", "https://[::1", "https://x:port/", "https://x/" + "a" * 2048,
    ],
)  # fmt: skip
def test_what_is_no_plain_link_is_none(url: str) -> None:
    assert link("a", url) is None


def test_a_job_names_its_own_in_annotations() -> None:
    given = {
        f"{ANNOTATION_PREFIX}wandb": "https://wandb.ai/team/runs/abc",
        f"{ANNOTATION_PREFIX}evil": "javascript:alert(1)",
        f"{ANNOTATION_PREFIX}<b>": "https://example.com",
        f"{ANNOTATION_PREFIX}list": ["https://example.com"],
        "other/wandb": "https://example.com",
    }
    assert links_of_annotations(given) == (Link("wandb", "https://wandb.ai/team/runs/abc", "wandb.ai"),)
    many = {f"{ANNOTATION_PREFIX}{number:02}": "https://example.com" for number in range(20)}
    assert len(links_of_annotations(many)) == 8


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


async def test_without_links_there_is_no_empty_list(folder: Folder) -> None:
    folder.status("digits", phase="Running")
    async with TestClient(TestServer(make_app(FolderSource.at(folder.root)))) as browser:
        assert "Other tools" not in await (await browser.get("/jobs/local/digits")).text()


def test_the_command_refuses_a_link_that_is_none(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    command = typer.main.get_command(app)
    with pytest.raises(SystemExit) as end:
        command(["dashboard", "--shared", str(tmp_path), "--link", "a=javascript:alert(1)"], prog_name="ddpjob")
    assert end.value.code == 2
    assert "--link" in capsys.readouterr().err
