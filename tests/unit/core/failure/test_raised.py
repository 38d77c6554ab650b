"""What to correct after an exception: from tracebacks that Python has really written."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.diagnosis import advice_for, diagnose
from ddpjob_operator.core.failure.raised import advice_on_exception
from ddpjob_operator.core.values.trainer_report import TerminationReport

SCRIPT = "/mnt/shared/work/digits/train.py"


def raised_by(source: str, path: str = SCRIPT) -> TerminationReport:
    """What a trainer reports of a program of this source."""
    with pytest.raises(Exception) as raised:
        exec(compile(source, path, "exec"), {})
    error = raised.value
    frames = error.__traceback__
    text = "".join(traceback.format_exception(error.with_traceback(frames and frames.tb_next)))  # without this test's
    return TerminationReport(exception=f"{type(error).__qualname__}: {error}", traceback=text)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        pytest.param("\n\nraise ValueError('x')", "the ValueError in train.py, line 3,", id="in the script"),
        pytest.param(
            "def load():\n  return {}['x']\n\nload()", "the KeyError in train.py, line 2,", id="in a function of it"
        ),
        pytest.param(
            "import json\njson.loads('{')", "the JSONDecodeError in train.py, line 2,", id="in what it called wrongly"
        ),
        pytest.param(
            "try:\n  1 / 0\nexcept ZeroDivisionError:\n  raise RuntimeError('x')",
            "the RuntimeError in train.py, line 4,",
            id="the last of a chain",
        ),
        pytest.param(
            "class Broken(Exception): pass\ndef f(n): return f(n - 1) if n else g()\ndef g(): raise Broken\nf(9)",
            "the Broken in train.py, line 3,",
            id="of its own, behind many frames",
        ),
        pytest.param("raise ExceptionGroup('x', [OSError()])", "the ExceptionGroup in train.py, line 1,", id="a group"),
    ],
)  # fmt: skip
def test_the_advice_names_the_exception_and_the_line_in_the_programs_own_code(source: str, what: str) -> None:
    report = raised_by(source)
    assert advice_on_exception(report, 300) == (
        f"Correct {what} and apply the job again: it resumes from the snapshot of step 300."
    )


def test_without_a_snapshot_the_advice_promises_none() -> None:
    assert advice_on_exception(raised_by("raise ValueError"), None) == (
        "Correct the ValueError in train.py, line 1, and apply the job again; it has no snapshot to resume from."
    )


def test_the_line_of_a_data_loader_worker_is_the_one_in_its_traceback() -> None:
    worker = raised_by("raise ValueError('four channels')", "/mnt/shared/work/digits/images.py").traceback
    text = f"ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal {worker}"
    main = f'Traceback (most recent call last):\n  File "{SCRIPT}", line 9, in <module>\n    next(loader)\n{text}'
    advice = advice_on_exception(TerminationReport(exception=text, traceback=main), 1)
    assert advice.startswith("Correct the ValueError in images.py, line 1, and apply")


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/python3.12/json/decoder.py",
        "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py",
        "/usr/lib/python3/dist-packages/torch/nn/functional.py",
        "/app/trainer_image/ddp_trainer/train/loop.py",
        "<frozen runpy>",
        "/mnt/shared/\x1b[31mtrain.py",
    ],
)
def test_a_file_that_is_not_the_programs_own_or_has_no_plain_name_is_not_named(path: str) -> None:
    assert advice_on_exception(raised_by("raise ValueError", path), 1).startswith(
        "Correct what raises the ValueError and apply the job again"
    )


def test_a_traceback_that_was_cut_leaves_the_type() -> None:
    report = TerminationReport(exception="torch.distributed.DistError: x", traceback="")
    assert advice_on_exception(report, None).startswith("Correct what raises the DistError and apply")


def test_a_traceback_whose_end_the_kubelet_has_cut_names_no_line() -> None:
    """The frame that raised is gone, and of the last line number more digits may have followed."""
    whole = raised_by("\n" * 1233 + "raise ValueError")
    position = whole.traceback.index("line 1234") + len("line 12")
    report = TerminationReport(exception=whole.exception, traceback=f"{whole.traceback[:position]}…")
    assert advice_on_exception(report, None).startswith("Correct what raises the ValueError and apply")


def test_an_end_that_is_no_exception_and_one_that_has_advice_of_its_own_keep_theirs() -> None:
    def advice(message: str, report: TerminationReport) -> str:
        return diagnose(Failure("WorkerException", message, Retry.YES, report=report), 300).advice

    assert advice("rank 0 exited with code 3", TerminationReport()) == advice_for("WorkerException")
    missing = raised_by("raise FileNotFoundError('data.pt')")
    assert advice("rank 0 raised FileNotFoundError: data.pt", missing).startswith("A file is missing")
    other = raised_by("raise ValueError('negative')")
    assert advice("rank 0 raised ValueError: negative", other).endswith("from the snapshot of step 300.")


@given(st.text(max_size=300), st.text(max_size=300))
def test_whatever_a_container_says_the_advice_is_one_plain_line(exception: str, text: str) -> None:
    report = TerminationReport(exception=exception, traceback=f'  File "{text}", line 3, in {text}\n')
    advice = advice_on_exception(report, 1)
    assert advice.isprintable()
    assert len(advice) < 300
