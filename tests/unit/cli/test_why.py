"""`ddpjob why` of a run on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from ddpjob_operator.cli.cluster_commands import why
from ddpjob_operator.cli.folder import explain_in_folder
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import REFUSED, Output
from ddpjob_operator.cli.why import explain_on_cluster
from ddpjob_operator.local.record import StatusFile
from ddpjob_operator.wire.jobs import parse_job

FAILURE = {
    "attempt": 0,
    "time": "2026-01-02T03:04:05Z",
    "reason": "WorkerException",
    "message": "rank 1 raised ValueError: wrong",
}
FAILED = {
    "metadata": {"name": "digits", "namespace": "research", "uid": "uid-1"},
    "spec": {},
    "status": {"phase": "Failed", "lastFailure": FAILURE},
}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one job, which has failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    job = parse_job(FAILED)
    StatusFile(tmp_path / "shared", job).write(job)
    return tmp_path / "shared"


def test_the_failure_of_a_run_is_explained_from_its_folder(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_in_folder(shared, "digits") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("digits: Failed")
    assert "rank 1 raised ValueError: wrong" in printed
    assert explain_in_folder(shared, "digits", Output.JSON) == 0
    assert json.loads(capsys.readouterr().out)["headline"].startswith("digits: Failed")


def test_a_job_that_the_folder_lacks_is_refused_with_those_that_it_has(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_in_folder(shared, "letters") == REFUSED
    assert capsys.readouterr().err == f"error: --shared {shared}: no job letters there; jobs: digits\n"


def test_a_folder_has_no_namespace(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        why("digits", shared, namespace="research")
    assert ended.value.exit_code == REFUSED
    assert "--shared: a folder has no namespaces" in capsys.readouterr().err


def test_without_a_cluster_the_run_of_this_machine_is_named(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_on_cluster(Cluster(), "digits") == REFUSED
    assert capsys.readouterr().err.endswith("ddpjob run had a job digits here: ddpjob why digits --shared shared\n")
    assert explain_on_cluster(Cluster(), "letters") == REFUSED
    assert "ddpjob why" not in capsys.readouterr().err
