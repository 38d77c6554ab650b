"""A person's file: what is right with it, and what is wrong with it line by line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ddpjob_operator.cli.documents import BadFile
from ddpjob_operator.cli.job_file import check_files, read_job

MINIMAL = """\
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata:
  name: digits
spec:
  nodes: 2
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    """What is said about a file, without the folder it is in."""
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(BadFile) as refusal:
        read_job(str(file))
    return [problem.replace(f"{tmp_path}/", "") for problem in refusal.value.problems]


def test_a_minimal_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MINIMAL)
    job = read_job(str(tmp_path / "job.yaml")).job
    assert (job.name, job.namespace, job.spec.nodes, job.spec.ranks_per_node) == ("digits", "default", 2, 1)


def test_each_reading_is_a_new_life_whatever_the_file_says(tmp_path: Path) -> None:
    text = MINIMAL.replace("  name: digits", "  name: digits\n  uid: old\n  creationTimestamp: 2020-01-01T00:00:00Z")
    (tmp_path / "job.yaml").write_text(text + "status: {phase: Succeeded, attempt: 7}\n")
    first, second = read_job(str(tmp_path / "job.yaml")).job, read_job(str(tmp_path / "job.yaml")).job
    assert len({first.uid, second.uid, "old", ""}) == 4
    assert first.created.year > 2020
    assert (first.status.phase, first.status.attempt) == (None, 0)


def piped(data: bytes) -> io.TextIOWrapper:
    """Standard input as Python has it in the locale C, where it can be read as text whatever it is."""
    return io.TextIOWrapper(io.BytesIO(data), "ascii", "surrogateescape")


def test_standard_input_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", piped(f"# für alle\n{MINIMAL}".encode()))
    assert read_job("-").job.name == "digits"


@pytest.mark.parametrize(
    ("stdin", "cause"),
    [(piped(MINIMAL.encode("utf-16")), "not UTF-8 text"), (None, "standard input is closed")],
    ids=["UTF-16", "closed"],
)
def test_standard_input_that_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOWrapper | None, cause: str
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(BadFile, match=f"^-: {cause}; name a YAML file"):
        read_job("-")


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    text = MINIMAL.replace("nodes: 2", "nodes: 0\n  procPerNode: 1\n  snapshots:\n    keep: 0")
    assert sorted(problems(tmp_path, text)) == [
        "job.yaml:6: spec.nodes: 0 is too small; use 1 or more",
        "job.yaml:7: spec.procPerNode: is not a field of a DDPJob; did you mean procsPerNode?",
        "job.yaml:9: spec.snapshots.keep: 0 is too small; use 1 or more",
    ]


def test_a_problem_in_a_list_has_the_line_of_its_item(tmp_path: Path) -> None:
    text = MINIMAL + "  env:\n    - name: LR\n      value: '1'\n    - name: RANK\n      value: '1'\n"
    assert problems(tmp_path, text) == [
        "job.yaml:10: spec.env[1].name: RANK is reserved for the operator; remove it",
    ]


def test_a_problem_of_what_is_not_there_has_the_line_of_what_should_hold_it(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL.replace("name: digits", "labels: {}")) == [
        "job.yaml:3: metadata.name: is missing; give the job a name"
    ]


def test_a_generated_name_is_valid_for_kubectl_create_and_none_to_resume_by(tmp_path: Path) -> None:
    generated = MINIMAL.replace("name: digits", "generateName: digits-")
    (tmp_path / "jobs.yaml").write_text(f"{generated}---\n{generated}")
    checked = check_files([str(tmp_path / "jobs.yaml")])
    assert [job.name for _, job in checked.valid] == ["digits-xxxxx"] * 2
    assert checked.problems == ()
    (problem,) = problems(tmp_path, generated)
    assert problem.startswith("job.yaml:4: metadata.generateName: is for `kubectl create` alone, and a job resumes")


@pytest.mark.parametrize("name", ["../../etc", "Digits", "a b", "-a", "a..b", "1" * 254, "a/b"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, MINIMAL.replace("name: digits", f"name: '{name}'"))
    assert problem.startswith(f"job.yaml:4: metadata.name: '{name}' is not a valid name; use lower-case letters")


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL + "  nodes: 4\n") == ["job.yaml:7: nodes: duplicate key; remove one of them"]


def test_broken_yaml_is_told_with_line_and_column(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, MINIMAL + "  args: ['--lr'\n")
    assert problem.startswith("job.yaml:8:1: is not valid YAML: ")


def test_a_tab_is_named(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, MINIMAL.replace("  nodes", "\tnodes"))
    assert problem == "job.yaml:6:1: is not valid YAML: a tab; indent with spaces"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "job.yaml: contains no document of kind DDPJob; add one"),
        ("just words", "job.yaml:1: text is no job: write an object with apiVersion, kind, metadata and spec"),
        ("- nodes: 2", "job.yaml:1: a list is no job: write an object with apiVersion, kind, metadata and spec"),
        (MINIMAL.replace("  nodes: 2\n", "- nodes\n"), "job.yaml:5: spec: must be an object; indent its fields"),
        (MINIMAL.replace("spec:\n  nodes: 2\n", "spec: []\n"), "job.yaml:5: spec: must be an object"),
        (MINIMAL.replace("  nodes: 2\n", ""), "job.yaml:5: spec: is missing; write spec: {}"),
        (MINIMAL.replace("spec:\n  nodes: 2\n", ""), "job.yaml:1: spec: is missing; write spec: {}"),
        (MINIMAL.replace("kind: DDPJob", "kind: PyTorchJob"), "write training.ddpjob.io/v1alpha1, DDPJob"),
        (f"{MINIMAL}---\n{MINIMAL}", "job.yaml: contains 2 jobs (digits, digits); name a file with one"),
    ],
)
def test_what_is_no_job_is_refused_with_what_to_write(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in problems(tmp_path, text)[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"none\.yaml: No such file or directory; name a YAML file"):
        read_job(str(tmp_path / "none.yaml"))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match=r"x\.yaml: not UTF-8 text"):
        read_job(str(tmp_path / "x.yaml"))


def test_documents_of_other_kinds_are_left_alone(tmp_path: Path) -> None:
    namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
    (tmp_path / "job.yaml").write_text(f"{namespace}---\n{MINIMAL}---\n")
    assert read_job(str(tmp_path / "job.yaml")).job.name == "digits"
    checked = check_files([str(tmp_path / "job.yaml")])
    assert ([job.name for _, job in checked.valid], checked.problems) == (["digits"], ())


def test_lines_count_from_the_top_of_the_file_in_every_document(tmp_path: Path) -> None:
    namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
    text = f"{namespace}---\n{MINIMAL.replace('nodes: 2', 'nodes: 0')}"
    assert problems(tmp_path, text) == ["job.yaml:10 (document 2): spec.nodes: 0 is too small; use 1 or more"]


@pytest.mark.parametrize("empty", ["", "# nothing yet\n", "null\n"])
def test_an_empty_document_counts_among_those_of_the_file(tmp_path: Path, empty: str) -> None:
    namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
    text = f"{namespace}---\n{empty}---\n{MINIMAL.replace('nodes: 2', 'nodes: 0')}"
    (problem,) = problems(tmp_path, text)
    assert problem.endswith(" (document 3): spec.nodes: 0 is too small; use 1 or more")
