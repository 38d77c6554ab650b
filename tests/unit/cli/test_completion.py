"""Completion: what may stand where, and that the shells' scripts ask for it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.support.tiers import program
from tests.support.waiting import PATIENCE_SECONDS, eventually

from ddpjob_operator.cli.completion import (
    SCRIPTS,
    Candidate,
    candidates,
    place_of,
    print_for_kubectl,
    wants_jobs,
    wants_nodes,
)
from ddpjob_operator.cli.main import app

ROOT = typer.main.get_command(app)
NAMES = (Candidate("digits", "Running"), Candidate("mnist"))


def values(line: str) -> list[str]:
    """Candidates for the last word of a command line, with two names on the cluster."""
    words = line.split(" ")
    place = place_of(ROOT, words)
    return [found.value for found in candidates(place, words[-1], NAMES)] if place is not None else []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sus", ["suspend"]),
        ("snapshots v", ["verify"]),
        ("why ", ["digits", "mnist"]),
        ("why m", ["mnist"]),
        ("why -n team d", ["digits"]),
        ("-n team why d", ["digits"]),
        ("--kubeconfig file --context=prod snapshots v", ["verify"]),
        ("--kub", ["--kubeconfig"]),
        ("snapshots verify --step 3 ", ["digits", "mnist"]),
        ("get digits ", []),
        ("snapshots ls --shared folder ", []),
        ("logs digits --foll", ["--follow"]),
        ("get -o ", ["wide", "json", "yaml", "name"]),
        ("get --output=w", ["--output=wide"]),
        ("drain-node ", ["digits", "mnist"]),
        ("drain-node --timeout ", []),
        ("drain-node digits ", []),
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


def test_what_stands_before_the_verb_counts_and_what_comes_after_it_wins() -> None:
    place = place_of(ROOT, ["--kubeconfig", "file", "-n", "team", "get", "-n", "other", ""])
    assert place is not None
    assert place.given == {"kubeconfig": "file", "namespace": "other"}


def test_a_node_is_asked_for_where_one_belongs_and_a_job_elsewhere() -> None:
    of_node, of_job = place_of(ROOT, ["drain-node", ""]), place_of(ROOT, ["get", ""])
    assert of_node is not None
    assert of_job is not None
    assert (wants_nodes(of_node, ""), wants_jobs(of_node, "")) == (True, False)
    assert (wants_nodes(of_job, ""), wants_jobs(of_job, "")) == (False, True)


@pytest.mark.processes
def test_without_a_cluster_there_are_no_names_and_no_messages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddpjob_operator.cli.main", "__complete", "get", ""]
    env = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def typing(tmp_path: Path) -> Path:
    """A folder with `ddpjob`, the scripts of the shells, and a file to be completed."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ddpjob"
    program.write_text(f"#!{sys.executable}\nfrom ddpjob_operator.cli.main import main\nmain()\n")
    program.chmod(0o755)
    for shell, text in SCRIPTS.items():
        (tmp_path / f"script.{shell}").write_text(text)
    (tmp_path / "job.yaml").touch()
    return tmp_path


def shell_environment(folder: Path) -> dict[str, str]:
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder), "TERM": "xterm"}
    return os.environ | home | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "KUBECONFIG": str(folder / "none")}


def told(folder: Path, *command: str) -> str:
    """What a shell prints, without a word on stderr."""
    done = subprocess.run(
        command, cwd=folder, env=shell_environment(folder), capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.processes
def test_bash_completes_with_the_script(typing: Path) -> None:
    typed = "COMP_WORDS=(ddpjob snapshots v); COMP_CWORD=2; _ddpjob_completion; echo ${COMPREPLY[@]}"
    assert told(typing, "bash", "-c", f"source script.bash; {typed}") == "verify\n"


@pytest.mark.processes
def test_fish_completes_with_the_script(typing: Path) -> None:
    lines = ["snapshots v", "get -o w", "get --output=w", "validate jo"]
    asked = "; ".join(f"complete -C 'ddpjob {line}'" for line in lines)
    found = told(typing, program("shells", "fish"), "--no-config", "-c", f"source script.fish; {asked}").splitlines()
    verb, *others = found
    assert verb.startswith("verify\tRead snapshots")
    assert [line.partition("\t")[0] for line in others] == ["wide", "--output=wide", "job.yaml"]


@pytest.mark.processes
def test_zsh_completes_with_the_script(typing: Path) -> None:
    """In a terminal: its completion does not run without its line editor. Ctrl-X writes the line into a file."""
    (typing / ".zshrc").write_text(
        "autoload -Uz compinit; compinit -u; source script.zsh; PS1='ready> '; unsetopt zle_bracketed_paste\n"
        "show() { print -r -- $BUFFER > line.part; mv line.part line; BUFFER= }; zle -N show; bindkey '^X' show\n"
    )
    command = [program("shells", "setsid"), "--ctty", program("shells", "zsh"), "-i"]
    environment = shell_environment(typing) | {"ZDOTDIR": str(typing)}
    terminal, end = os.openpty()
    shell = subprocess.Popen(command, cwd=typing, env=environment, stdin=end, stdout=end, stderr=end)
    os.close(end)
    printed = bytearray()

    def ready() -> bool:
        read()
        return b"ready> " in printed

    def read() -> None:
        """A terminal that nobody reads from blocks."""
        if select.select([terminal], [], [], 0)[0]:
            printed.extend(os.read(terminal, 4096))

    def completed(typed: str) -> str:
        os.write(terminal, f"ddpjob {typed}\t\x18".encode())
        line = typing / "line"

        def written() -> bool:
            read()
            return line.exists()

        eventually(written, f"zsh completes {typed}", instead=lambda: bytes(printed))
        text = line.read_text().strip()
        line.unlink()
        return text

    try:
        eventually(ready, "zsh is ready", instead=lambda: bytes(printed))
        assert completed("snapshots v") == "ddpjob snapshots verify"
        assert completed("get -o w") == "ddpjob get -o wide"
        assert completed("get --output=w") == "ddpjob get --output=wide"
        assert completed("validate jo") == "ddpjob validate job.yaml"
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_kubectl_gets_cobras_form(capsys: pytest.CaptureFixture[str]) -> None:
    print_for_kubectl(ROOT, ["snapshots", "v"])
    first, directive = capsys.readouterr().out.splitlines()
    assert first.startswith("verify\tRead snapshots")
    assert directive == ":4"
    print_for_kubectl(ROOT, ["validate", ""])
    assert capsys.readouterr().out == ":0\n"
