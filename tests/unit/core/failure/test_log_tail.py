"""What is saved of a pod before it is deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import failed, make_job, make_pod, seen
from tests.support.secret_names import VARIABLES

from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.log_tail import TAIL_CHARACTERS, log_tail, log_to_read, whole_lines
from ddpjob_operator.core.values.actions import ReadLog

POD = failed(1, 1, "WorkerException")


def failure(reason: str = "WorkerException", pod: str | None = POD.name) -> Failure:
    return Failure(reason, "it was", Retry.YES, pod_name=pod)


@pytest.mark.parametrize(
    ("cause", "logs", "read"),
    [
        (failure(), {}, ReadLog(POD.name, POD.uid)),
        (failure(), {POD.uid: ""}, None),
        (failure("NodeLost"), {}, None),
        (failure("PodDeleted"), {}, None),
        (replace(failure("Evicted"), outside=True), {}, None),
        (failure(pod="digits-0-7"), {}, None),
        (failure(pod=None), {}, None),
    ],
    ids=[
        "not yet",
        "once",
        "no kubelet to ask",
        "no pod to ask",
        "no word about it",
        "a pod that nobody sees",
        "nobody's failure",
    ],
)
def test_the_log_of_the_pod_that_failed_is_read_once_and_where_it_can_be(
    cause: Failure, logs: dict[str, str], read: ReadLog | None
) -> None:
    assert log_to_read(seen(POD, make_pod(0), logs=logs), cause) == read


def test_the_tail_is_as_many_whole_lines_from_the_end_as_there_is_room_for() -> None:
    text = "\n".join(f"line {number}" for number in range(2000))
    tail = log_tail(make_job(), seen(POD, logs={POD.uid: text}), failure())
    assert TAIL_CHARACTERS - len("line 1999\n") <= len(tail) <= TAIL_CHARACTERS
    assert tail.startswith("line ")
    assert tail.endswith("line 1999")


def test_a_log_that_just_fits_is_kept_whole() -> None:
    text = f"first\n{'x' * (TAIL_CHARACTERS - len('first') - 1)}"
    assert log_tail(make_job(), seen(POD, logs={POD.uid: text}), failure()) == text


@pytest.mark.parametrize("cause", [failure(), failure(pod="digits-0-7")], ids=["not read", "of a pod that is gone"])
def test_a_log_that_is_not_there_has_no_tail(cause: Failure) -> None:
    assert log_tail(make_job(), seen(POD, logs={}), cause) == ""


def test_what_the_jobs_variables_keep_secret_is_masked() -> None:
    env = [{"name": "HF_TOKEN", "value": "hf_abcdef"}, {"name": "LEVEL", "value": "verbose"}]
    env += [{"name": "DB_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "db", "key": "password"}}}]
    logs = {POD.uid: "token hf_abcdef, verbose"}
    assert log_tail(make_job(env=env), seen(POD, logs=logs), failure()) == "token ***, verbose"


def test_so_is_what_those_of_the_trainer_in_the_pod_template_keep_secret() -> None:
    env = [{"name": "HF_TOKEN", "value": "hf_abcdef"}, {"name": "LEVEL", "value": "verbose"}]
    env += [{"name": "DB_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "db", "key": "password"}}}]
    sidecar = {"name": "sidecar", "image": "i", "env": [{"name": "ITS_TOKEN", "value": "elsewhere"}]}
    again = {"name": "trainer", "env": [{"name": "OTHER_TOKEN", "value": "also-hidden"}]}  # merged into the first
    trainers = [{"name": "trainer", "env": env}, again]
    template = {"spec": {"containers": [*trainers, sidecar, {"name": "bare", "image": "i"}]}}
    logs = {POD.uid: "token hf_abcdef, verbose, elsewhere, also-hidden"}
    assert log_tail(make_job(podTemplate=template), seen(POD, logs=logs), failure()) == (
        "token ***, verbose, elsewhere, ***"
    )


@pytest.mark.parametrize(
    "env",
    [{"HF_TOKEN": "hf_abcdef\n"}, {"A_TOKEN": "hf_abc", "HF_TOKEN": "hf_abcdef"}],
    ids=["with a line break", "of which another one is the beginning"],
)
def test_a_secret_is_masked_whole(env: dict[str, str]) -> None:
    job = make_job(env=[{"name": name, "value": value} for name, value in env.items()])
    assert log_tail(job, seen(POD, logs={POD.uid: "no user has hf_abcdef"}), failure()) == "no user has ***"


@pytest.mark.parametrize(("name", "value", "is_secret"), VARIABLES)
def test_the_name_of_a_variable_says_whether_it_is_secret_and_a_count_of_tokens_is_not(
    name: str, value: str, is_secret: bool
) -> None:
    job = make_job(env=[{"name": name, "value": value}])
    kept = log_tail(job, seen(POD, logs={POD.uid: f"at {value}"}), failure())
    assert kept == ("at ***" if is_secret else f"at {value}")


@pytest.mark.parametrize(("value", "kept"), [("abcde", "it is abcde"), ("abcdef", "it is ***")])
def test_a_value_too_short_for_a_secret_is_not_masked(value: str, kept: str) -> None:
    job = make_job(env=[{"name": "MY_TOKEN", "value": value}])
    assert log_tail(job, seen(POD, logs={POD.uid: f"it is {value}"}), failure()) == kept


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("GET https://me:hunter2@example.com/d.tar", "GET https://***@example.com/d.tar"),
        ("https://example.com/d?X-Amz-Signature=0123abcd&b=1", "https://example.com/d?X-Amz-Signature=***&b=1"),
        ("https://example.com/d?access_token=abcdef1", "https://example.com/d?access_token=***"),
        ("{'Authorization': 'Bearer abc.def-123'}", "{'Authorization': 'Bearer ***'}"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=***"),
        ('{"api_key": "0123456789"}', '{"api_key": "***"}'),
        ("logged in with hf_abcdefghijklmnop.", "logged in with ***."),
        ("ssh://git@example.com:22/repo and 3 tokens: 12", "ssh://***@example.com:22/repo and 3 tokens: 12"),
        ("step 12, loss 0.25, https://example.com/a@b", "step 12, loss 0.25, https://example.com/a@b"),
    ],
)
def test_what_looks_like_a_secret_is_masked_wherever_it_comes_from(said: str, kept: str) -> None:
    assert log_tail(make_job(), seen(POD, logs={POD.uid: said}), failure()) == kept


def test_masking_takes_linear_time_in_a_log_that_a_tenant_writes() -> None:
    # a backtracking engine tries every split of the words between two `\w*`, cubic in their length: years for this
    hostile = "passw" * 20_000 + "\n"
    assert log_tail(make_job(), seen(POD, logs={POD.uid: hostile + "the end"}), failure()) == "the end"


def test_no_second_half_of_a_secret_is_left_at_the_beginning() -> None:
    text = b"key 0123456789abcdef\n" + b"epoch 1\n" * 10
    cut = len(text) - len("key 01234567")
    assert whole_lines(text, cut) == b"epoch 1\n" * 10
    assert whole_lines(text, len(text)) == text
    assert whole_lines(b"x" * 50, 20) == b"x" * 20, "of a line that is longer than all that is kept, its end"
    assert whole_lines(b"epoch 1\n" + b"x" * 50 + b"\n\n", 20) == b"x" * 18 + b"\n\n"
