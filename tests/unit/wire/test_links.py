"""Links of a job: which annotations are some, and what is none before a job has it."""

from __future__ import annotations

import pytest

from ddpjob_operator.wire.links import ANNOTATION_PREFIX, Link, annotations_of_links, link, links_of_annotations

WANDB = "https://wandb.ai/team/runs/abc"


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


def test_what_is_submitted_is_what_the_page_shows() -> None:
    grafana = "http://grafana.team.example:3000/explore?panes={%22a%22:1}#x"
    annotations = annotations_of_links({"wandb": WANDB, "Team-1_grafana.v2": grafana})
    assert annotations == {
        "links.training.ddpjob.io/wandb": WANDB,
        "links.training.ddpjob.io/Team-1_grafana.v2": grafana,
    }
    assert links_of_annotations(annotations) == (
        Link("Team-1_grafana.v2", grafana, "grafana.team.example:3000"),
        Link("wandb", WANDB, "wandb.ai"),
    )


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ({"wandb": "javascript:alert(1)"}, "wandb=javascript:alert(1): this is no URL that begins with http:// or"),
        ({"wandb": "wandb.ai/team"}, "wandb=wandb.ai/team: this is no URL that begins with http:// or https://; write"),
        ({"wandb": "https://me:secret@wandb.ai/"}, "write one, without a user, a space or a character that is not ASC"),
        ({"wandb": 7}, "wandb=7: this is no URL"),
        ({"W&B": WANDB}, f"W&B={WANDB}: 'W&B' cannot be the end of an annotation's name; write at most 40 letters"),
        ({"": WANDB}, "'' cannot be the end of an annotation's name"),
        ({"a" * 41: WANDB}, "write at most 40 letters, digits, -, _ and ."),
        ({"wandb": f"{WANDB}/{{name}}"}, "{name} is for links of all jobs; write what this job has there"),
        ({f"l{number}": WANDB for number in range(9)}, "9 links are given, and a page shows 8; leave out the others"),
    ],
)  # fmt: skip
def test_a_link_that_the_page_would_not_show_is_refused(links: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        annotations_of_links(links)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
