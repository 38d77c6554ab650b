"""Completion: what may stand where, and that the shells' scripts ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ddpjob_operator.cli.completion import SCRIPTS, Candidate, candidates, place_of, print_for_kubectl, wants_jobs
from ddpjob_operator.cli.main import app

ROOT = typer.main.get_command(app)
JOBS = (Candidate("digits", "Running"), Candidate("mnist"))


def values(line: str) -> list[str]:
    """Candidates for the last word of a command line, with two jobs on the cluster."""
    words = line.split(" ")
    place = place_of(ROOT, words)
    return [found.value for found in candidates(place, words[-1], JOBS)] if place is not None else []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sus", ["suspend"]),
        ("snapshots v", ["verify"]),
        ("why ", ["digits", "mnist"]),
        ("why m", ["mnist"]),
        ("why -n team d", ["digits"]),
        ("snapshots verify --step 3 ", ["digits", "mnist"]),
        ("get digits ", []),
        ("snapshots ls --shared folder ", []),
        ("logs digits --foll", ["--follow"]),
        ("get -o ", ["wide", "json", "yaml", "name"]),
        ("get --output=w", ["--output=wide"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("validate ", []),
        ("nothing ", []),
        ("why --namespace ", []),
    ],
)
def test_what_may_stand_there_is_offered(line: str, expected: list[str]) -> None:
    assert values(line) == expected


def test_every_verb_is_offered_with_what_it_does() -> None:
    found = candidates(place_of(ROOT, [""]), "")  # type: ignore[arg-type]
    assert {"run", "ls", "why", "snapshots", "cancel"} <= {candidate.value for candidate in found}
    assert all(candidate.meaning for candidate in found)


def test_names_are_asked_for_in_the_namespace_and_context_of_the_line() -> None:
    words = ["get", "--context=prod", "-n", "team", ""]
    place = place_of(ROOT, words)
    assert place is not None
    assert wants_jobs(place, "")
    assert place.given == {"context": "prod", "namespace": "team"}


def test_without_a_cluster_there_are_no_names_and_no_messages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddpjob_operator.cli.main", "__complete", "get", ""]
    env = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "ddpjob"
    program.write_text(f"#!{sys.executable}\nfrom ddpjob_operator.cli.main import main\nmain()\n")
    program.chmod(0o755)
    (tmp_path / "completion").write_text(SCRIPTS["bash"])
    typed = "COMP_WORDS=(ddpjob snapshots v); COMP_CWORD=2; _ddpjob_completion; echo ${COMPREPLY[@]}"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/completion; {typed}"], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("verify\n", "")


def test_kubectl_gets_cobras_form(capsys: pytest.CaptureFixture[str]) -> None:
    print_for_kubectl(ROOT, ["snapshots", "v"])
    first, directive = capsys.readouterr().out.splitlines()
    assert first.startswith("verify\tRead snapshots")
    assert directive == ":4"
    print_for_kubectl(ROOT, ["validate", ""])
    assert capsys.readouterr().out == ":0\n"
