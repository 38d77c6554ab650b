"""The termination message: the contract's fields, in 4,096 bytes, whatever a script throws."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.secret_names import VARIABLES

from ddp_trainer.launch.exit.root_cause import ExitCause, ExitEvidence
from ddp_trainer.launch.exit.termination_message import encode, message_of, redacted

CONTRACT = (Path(__file__).parents[4] / "docs" / "contracts.md").read_text()
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", CONTRACT.split("## 5.")[1], re.DOTALL)[1])


def test_the_message_has_exactly_the_fields_of_the_contract():
    message = message_of(ExitCause(1, "WorkerKilled", "text"), None, ExitEvidence(wall=1.0, procs=1))
    assert list(message) == list(EXAMPLE)


def test_what_may_be_long_comes_last_where_the_kubelet_cuts():
    message = message_of(ExitCause(1, "WorkerKilled", "text"), None, ExitEvidence(wall=1.0, procs=1))
    assert list(message)[-5:] == ["message", "metrics", "exception", "cut", "traceback"]


def test_a_message_that_fits_is_not_cut():
    assert json.loads(encode(EXAMPLE)) == EXAMPLE


texts = (
    st.none()
    | st.text(max_size=6000)
    | st.sampled_from(["\x00" * 5000, "é" * 5000, "😀" * 3000, '"\\' * 4000, "\ud800" * 9])
)


@given(traceback=texts, exception=texts, message=texts.map(lambda text: text or ""), metrics=st.integers(0, 300))
def test_any_message_fits_and_stays_json(traceback, exception, message, metrics):
    values = {f"metric_{number}": 0.123456789 for number in range(metrics)}
    cut = EXAMPLE | {"traceback": traceback, "exception": exception, "message": message, "metrics": values}
    encoded = encode(cut)
    assert len(encoded) <= 4096
    assert set(json.loads(encoded)) == set(EXAMPLE)


@pytest.mark.parametrize(
    ("long", "cut"),
    [
        (["traceback", "exception"], {"traceback"}),
        (["exception", "message"], {"exception"}),
        (["message"], {"message"}),
    ],
)
def test_long_fields_are_cut_in_the_order_of_the_contract(long, cut):
    size = 3900 // len(long)
    original = EXAMPLE | dict.fromkeys(long, "x" * size)
    short = json.loads(encode(original))
    assert {name for name in EXAMPLE if short[name] != original[name]} == cut


@pytest.mark.parametrize("exception", [None, "ValueError: bad"])
def test_many_metrics_are_cut_before_what_says_why_the_pod_ended(exception):
    values = {f"validation/accuracy_of_class_{number}": 0.123456789 for number in range(150)}
    texts = {"message": "rank 1 raised ValueError", "exception": exception, "traceback": exception and "x" * 900}
    short = json.loads(encode(EXAMPLE | texts | {"metrics": values}))
    assert {name: short[name] for name in texts} == texts
    kept = short["metrics"]
    assert kept == dict(list(values.items())[: len(kept)])
    one_more = dict(list(values.items())[: len(kept) + 1])
    assert len(json.dumps(short | {"metrics": one_more}, ensure_ascii=False).encode()) > 4096, "cut by more than needed"


def test_a_long_traceback_leaves_a_part_of_the_metrics_and_they_leave_most_of_it():
    values = {f"metric_{number}": 0.5 for number in range(300)}
    encoded = encode(EXAMPLE | {"traceback": "x" * 9000, "exception": "ValueError: bad", "metrics": values})
    short = json.loads(encoded)
    assert 1000 < len(json.dumps(short["metrics"])) <= 1024
    assert len(short["traceback"]) > 2000
    assert short["exception"] == "ValueError: bad"
    assert len(encoded) == 4096


def test_of_a_traceback_the_end_is_kept_and_of_a_message_the_beginning():
    long = EXAMPLE | {"traceback": "start" + "x" * 5000 + "ValueError", "message": "rank 1" + "y" * 5000}
    short = json.loads(encode(EXAMPLE | {"traceback": long["traceback"]}))
    assert short["traceback"].startswith("…")
    assert short["traceback"].endswith("ValueError")
    assert json.loads(encode(long))["message"].startswith("rank 1yyy")


def test_values_of_secret_variables_are_masked_everywhere():
    message = EXAMPLE | {"message": "login with hunter22 failed", "traceback": "token=hunter22"}
    masked = redacted(message, {"DB_PASSWORD": "hunter22", "HF_TOKEN": "", "PATH": "failed"})
    assert (masked["message"], masked["traceback"]) == ("login with *** failed", "token=***")


@pytest.mark.parametrize(
    "environ",
    [{"HF_TOKEN": "hf_abcdef\n"}, {"A_TOKEN": "hf_abc", "HF_TOKEN": "hf_abcdef"}],
    ids=["with the line break of a file", "of which another one is the beginning"],
)
def test_a_secret_is_masked_whole(environ):
    masked = redacted(EXAMPLE | {"message": "no user has hf_abcdef"}, environ)
    assert masked["message"] == "no user has ***"


@pytest.mark.parametrize(("name", "value", "is_secret"), VARIABLES)
def test_the_name_of_a_variable_says_whether_it_is_secret_and_a_count_of_tokens_is_not(name, value, is_secret):
    masked = redacted(EXAMPLE | {"message": f"at {value}"}, {name: value})
    assert masked["message"] == ("at ***" if is_secret else f"at {value}")
