"""docs/api.md is what the models say, and leaves nothing out."""

from __future__ import annotations

import pytest

from ddpjob_operator.api import docs
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import DDPJobStatus


def test_the_page_is_what_the_models_say() -> None:
    assert docs.PAGE.read_text() == docs.rendered()


@pytest.mark.parametrize("model", [DDPJobSpec, DDPJobStatus])
def test_every_field_has_a_row(model: type[DDPJobSpec | DDPJobStatus]) -> None:
    page = docs.rendered()
    assert [field.alias for field in model.model_fields.values() if f"| `{field.alias}` |" not in page] == []


def test_a_row_gives_type_default_bounds_and_words() -> None:
    row = next(line for line in docs.rendered().splitlines() if line.startswith("| `keep` |"))
    assert row.startswith("| `keep` | integer | `3` | Number of verified snapshots to keep.")
    assert row.endswith("(1 to 1000) |")
