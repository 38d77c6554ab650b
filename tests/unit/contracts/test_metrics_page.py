"""docs/metrics.md is generated from the metric tables of both packages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from ddp_trainer.launch.status import metric_table as trainer
from ddpjob_operator import metric_table as operator

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/metrics.py"))


def test_the_page_is_up_to_date(generator: dict[str, Any]) -> None:
    assert generator["PAGE"].read_text() == generator["rendered"]()


def test_every_metric_has_a_row(generator: dict[str, Any]) -> None:
    page = generator["rendered"]()
    assert [name for name in (*operator.TABLE, *trainer.TABLE) if f"| `{name}` |" not in page] == []


def test_no_name_is_used_twice() -> None:
    assert operator.TABLE.keys() & trainer.TABLE.keys() == set()


def test_the_documents_name_no_metric_that_does_not_exist() -> None:
    """A metric that was renamed has to be renamed in the documents."""
    known = {*operator.TABLE, *trainer.TABLE}
    suffixes = ("_bucket", "_sum", "_count")
    wrong = []
    for document in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("charts/**/*.md")):
        for word in _metrics_in(document.read_text()):
            base = next((word.removesuffix(suffix) for suffix in suffixes if word.endswith(suffix)), word)
            if word not in known and base not in known:
                wrong.append(f"{document.relative_to(ROOT)}: {word}")
    assert wrong == []


def _metrics_in(text: str) -> list[str]:
    return re.findall(r"\bddpjob_(?:operator|status|train|trainer|snapshot|rank)_\w+[a-z](?![\w/.*])", text)
