"""YAML of jobs: what is written is read by kubectl as it was meant, and what is read is what kubectl reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from ddpjob import DDPJob
from ddpjob_operator.cli.documents import read_documents
from ddpjob_operator.cli.job_file import check_files
from ddpjob_operator.submit.kubectl_yaml import dump

AS_KUBECTL = [
    ("1e-3", 0.001), ("3E5", 300000.0), ("-2e-1", -0.2), ("1.5e3", 1500.0), (".5", 0.5), ("1.", 1.0), ("08", 8.0),
    ("17", 17), ("+1", 1), ("017", 15), ("0o17", 15), ("0x1F", 31), ("0b11", 3), ("1_000", 1000),
    ("y", True), ("N", False), ("Yes", True), ("off", False), ("true", True), ("null", None), ("~", None),
    ("12:30", "12:30"), ("1:02:03", "1:02:03"), ("2026-01-01", "2026-01-01"), ("=", "="), ("1e", "1e"), ("e3", "e3"),
    ("1.2.3", "1.2.3"), ("yES", "yES"), ("3e-4x", "3e-4x"), ("train", "train"), ("7e12345", "7e12345"),
    ("-1e999", "-1e999"), ("1e-999", 0.0), (".inf", math.inf), ("-.INF", -math.inf),
]  # fmt: skip
"""Scalars without quotes, and what go-yaml 2.4 makes of them (resolve.go)."""
IDS = [text for text, _ in AS_KUBECTL]


@pytest.mark.parametrize(("text", "value"), AS_KUBECTL, ids=IDS)
def test_what_has_no_quotes_is_what_it_is_for_kubectl(text: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}\n")
    (document,) = read_documents(str(tmp_path / "a.yaml"))
    assert document.content == {"a": value}
    assert type(document.content["a"]) is type(value)


@pytest.mark.parametrize("text", IDS)
def test_a_text_stays_one_for_every_reader(text: str, tmp_path: Path) -> None:
    """PyYAML writes 3e-4 and y without quotes; kubectl read a number and a truth value, and the job was refused."""
    written = dump({text: [text]})
    (tmp_path / "a.yaml").write_text(written)
    (document,) = read_documents(str(tmp_path / "a.yaml"))
    assert document.content == yaml.safe_load(written) == {text: [text]}


@pytest.mark.parametrize("value", [0.5, 1e-5, 1e20, 3, -7, True, None, "größe", ["a", {"b": 1}]])
def test_every_other_value_stays_what_it_is(value: object, tmp_path: Path) -> None:
    written = dump({"a": value})
    (tmp_path / "a.yaml").write_text(written)
    (document,) = read_documents(str(tmp_path / "a.yaml"))
    assert document.content == yaml.safe_load(written) == {"a": value}


def test_a_learning_rate_is_in_quotes_in_the_file_of_a_job(tmp_path: Path) -> None:
    text = DDPJob(script="train.py", args=["--lr", "3e-4"], folder=tmp_path).to_yaml()
    assert "- '3e-4'\n" in text


def test_one_without_quotes_is_refused_as_the_api_server_does(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("apiVersion: training.ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: a}\n")
    with file.open("a") as more:
        more.write("spec:\n  args: [--lr, 1e-3]\n")
    said = f'{file}:5: spec.args[1]: 0.001 is not text; write it in quotes: "0.001"'
    assert check_files([str(file)]).problems == (said,)
