"""The status on its way out (merge patches) and the trainer's report on its way in."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.api.status import Condition, DDPJobStatus, Internal, NodeCount, Phase, Progress
from ddpjob_operator.cluster.status_poll import Target, read_answer
from ddpjob_operator.cluster.status_write import change_between, merge_patch_between, wire_form
from ddpjob_operator.core.values.trainer_report import TrainerReport

TARGET = Target("10.0.0.1", "uid-1", 0)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


values = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


@given(objects, objects)
def test_applying_the_patch_gives_what_was_wanted(current: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert merged(current, merge_patch_between(current, wanted)) == wanted


@given(objects)
def test_no_difference_is_no_patch(current: dict[str, Any]) -> None:
    assert merge_patch_between(current, current) == {}


def test_a_status_that_was_written_needs_no_second_write() -> None:
    condition = Condition(type="Running", status="False", last_transition_time=NOW)
    status = DDPJobStatus(phase=Phase.RUNNING, conditions=(condition,), start_time=NOW, nodes=NodeCount(total=2))
    on_server = json.loads(json.dumps(wire_form(status)))
    assert change_between(on_server, DDPJobStatus.model_validate(on_server)).empty


def test_fields_that_an_older_operator_did_not_know_are_not_written_while_they_are_empty() -> None:
    status = DDPJobStatus(phase=Phase.SUCCEEDED, nodes=NodeCount(total=2))
    older = wire_form(status)
    del older["failures"], older["internal"]["succeededNodes"]
    assert change_between(older, status).empty
    assert change_between({"failures": [1]}, status).patch["failures"] == []
    nothing_known = status.model_copy(update={"internal": Internal(spec_digests={})})
    assert change_between(older, nothing_known).patch == {"internal": {"specDigests": {}}}, "no default"


def test_nothing_empty_is_sent_in_a_condition() -> None:
    condition = Condition(type="Running", status="False", last_transition_time=NOW)
    assert "message" not in wire_form(DDPJobStatus(conditions=(condition,)))["conditions"][0]


@pytest.mark.parametrize(
    ("update", "only_progress"),
    [
        ({"progress": Progress(step=2)}, True),
        ({"nodes": NodeCount(ready=1, total=2)}, True),
        ({"phase": Phase.RUNNING}, False),
        ({"progress": Progress(step=2), "restarts": 1}, False),
    ],
)
def test_a_change_of_progress_is_told_from_a_change_that_matters(update: dict[str, Any], only_progress: bool) -> None:
    before = DDPJobStatus(phase=Phase.STARTING, progress=Progress(step=1))
    assert change_between(wire_form(before), before.model_copy(update=update)).only_progress is only_progress


def body(**fields: Any) -> bytes:
    return json.dumps({"version": 1, "uid": "uid-1", "attempt": 0, "phase": "train", "step": 3} | fields).encode()


def test_an_answer_of_the_trainer_that_was_asked_gets_through() -> None:
    assert read_answer(body(), TARGET) == TrainerReport(uid="uid-1", attempt=0, phase="train", step=3)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json",
        body(version=2),
        body(uid="somebody else's"),
        body(attempt=1),
        b" " * 300_000 + body(),
    ],
)
def test_an_answer_that_is_not_for_us_or_not_of_the_contract_is_dropped(answer: bytes) -> None:
    assert read_answer(answer, TARGET) is None
