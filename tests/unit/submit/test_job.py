"""A job as a person writes it, with a folder of code: what becomes of it, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob_operator.cli.documents import BadFile
from ddpjob_operator.cli.job_file import check_files, read_job
from ddpjob_operator.cli.submission import Given, content_of, read_given, written
from ddpjob_operator.submit.pack import name_of, pack


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print(1)")
    (tmp_path / "requirements.txt").write_text("tqdm")
    return tmp_path


def job(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": "mine"},
        "spec": {"entrypoint": {"script": "src/train.py"}, **spec},
    }


def problems(given: Given) -> tuple[str, ...]:
    with pytest.raises(BadFile) as refusal:
        read_given(given)
    return refusal.value.problems


def test_a_script_becomes_a_job_with_the_code_of_this_folder(here: Path) -> None:
    options = {"nodes": 2, "gpus": 4, "image": "mine:1", "requirements": "requirements.txt", "claim": "data"}
    submission = read_given(Given("src/train.py", ("--lr", "3e-4"), options, ("A=b=c",)))
    packed = pack(here)
    assert submission.code is not None
    assert submission.content == job(
        nodes=2,
        code={
            "requirements": "requirements.txt",
            "configMaps": [name_of(part) for part in packed.parts],
            "sha256": packed.sha256,
        },
        args=["--lr", "3e-4"],
        image="mine:1",
        resources={"limits": {"nvidia.com/gpu": 4}},
        env=[{"name": "A", "value": "b=c"}],
        shared={"claimName": "data"},
    ) | {"metadata": {"name": "train"}}
    assert (submission.job.name, submission.job.ranks) == ("train", 8)


def test_what_a_dry_run_prints_is_the_same_job_as_yaml(here: Path) -> None:
    given = Given("src/train.py", (), {"name": "mine", "nodes": 1})
    (here.parent / "job.yaml").write_text(yaml.safe_dump(content_of(given)).replace("path: .", f"path: {here.name}"))
    assert read_job(str(here.parent / "job.yaml")).content == read_given(given).content


def test_an_absolute_path_into_this_folder_is_a_path_in_it(here: Path) -> None:
    given = Given(str(here / "src" / "train.py"))
    assert read_given(given).content["spec"]["entrypoint"]["script"] == "src/train.py"


def test_a_path_that_leads_into_this_folder_by_a_link_or_from_above_is_a_path_in_it(here: Path) -> None:
    link = here.with_name(f"{here.name}-link")
    link.symlink_to(here)
    (here / "newest").symlink_to("src")
    for path in (f"{link}/src/train.py", f"../{here.name}/src/train.py", "newest/train.py"):
        assert read_given(Given(path)).content["spec"]["entrypoint"]["script"] == "src/train.py"
    (here / "main.py").symlink_to("src/train.py")
    assert read_given(Given(f"{link}/main.py")).content["spec"]["entrypoint"]["script"] == "main.py"


def test_a_variable_without_a_value_is_the_shells(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "t")
    found = read_given(Given("src/train.py", env=("MY_TOKEN",))).content
    assert found["spec"]["env"] == [{"name": "MY_TOKEN", "value": "t"}]


def test_links_are_annotations_of_the_job(here: Path) -> None:
    given = Given("src/train.py", links=("wandb=https://wandb.ai/?a=b", "logs=http://logs.example"))
    submission = read_given(given)
    annotations = {
        "links.training.ddpjob.io/wandb": "https://wandb.ai/?a=b",
        "links.training.ddpjob.io/logs": "http://logs.example",
    }
    assert submission.content["metadata"] == {"name": "train", "annotations": annotations}
    (here / "job.yaml").write_text(yaml.safe_dump(written(given, submission)))
    assert read_job("job.yaml").content["metadata"]["annotations"] == annotations


def test_an_owner_is_an_annotation_of_a_script_and_of_a_file_that_names_none(here: Path) -> None:
    links = ("wandb=https://wandb.ai/?a=b",)
    given = Given("src/train.py", links=links, owner=" team-vision ")
    submission = read_given(given)
    owner = {"training.ddpjob.io/owner": "team-vision"}
    assert submission.content["metadata"]["annotations"] == {"links.training.ddpjob.io/wandb": links[0][6:]} | owner
    assert written(given, submission)["metadata"] == submission.content["metadata"], "a dry run prints it too"
    (here / "job.yaml").write_text(yaml.safe_dump(job(code={"path": "."})))
    assert read_given(Given("job.yaml", owner="team-vision")).content["metadata"] == {
        "name": "mine", "annotations": owner
    }  # fmt: skip
    assert read_given(Given("job.yaml", owner="")).content["metadata"]["annotations"] == owner | {
        "training.ddpjob.io/owner": ""
    }
    assert "annotations" not in read_given(Given("job.yaml")).content["metadata"]


def test_an_owner_in_the_file_is_not_overwritten(here: Path) -> None:
    metadata = {"name": "mine", "annotations": {"training.ddpjob.io/owner": "ada"}}
    (here / "job.yaml").write_text(yaml.safe_dump({**job(code={"path": "."}), "metadata": metadata}))
    assert read_given(Given("job.yaml")).content["metadata"] == metadata
    assert problems(Given("job.yaml", owner="eve")) == (
        "--owner: the job names one already, in the annotation training.ddpjob.io/owner; leave out one of them",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Given("trian.py"), "trian.py: there is no such file"),
        (Given("/usr/lib/train.py"), "is not below"),
        (Given("src/train.py", env=("NOT_SET_HERE",)), "write --env NOT_SET_HERE=VALUE"),
        (Given("src/train.py", env=("RANK=0",)), "RANK is reserved for the operator"),
        (
            Given("src/train.py", options={"requirements": "requirement.txt"}),
            "spec.code.requirements: 'requirement.txt' is not in .; did you mean requirements.txt?",
        ),
        (Given("src/train.py", options={"name": "My Job"}), "metadata.name: 'My Job' is not a valid name"),
        (Given("src/train.py", links=("https://x.example",)), "no name; write --link NAME=https://x.example"),
        (Given("src/train.py", links=("a=file:///x",)), "--link a=file:///x: this is no URL that begins with http://"),
        (Given("src/train.py", owner="x" * 65), "--owner: has 65 characters; write at most 64"),
        (Given("src/train.py", owner="a\x1b[2J"), "--owner: 'a\\x1b[2J' has characters that cannot be printed"),
        (Given("job.yaml", ("--lr",), {"nodes": 2}), "--nodes, the arguments after --: for a script"),
        (Given("job.yaml", links=("a=https://x.example",)), "--link: for a script; job.yaml has fields for it"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(here: Path, given: Given, said: str) -> None:
    (line,) = problems(given)
    assert said in line


@pytest.mark.parametrize(
    ("listed", "sends"),
    [
        ("src/\n", "!src/"),  # as in git, nothing in a folder that is listed is looked at
        ("*.py\n", "!src/train.py"),
        ("src/train.py\n", "!src/train.py"),
        ("src/*\n", "!src/train.py"),
    ],
)
def test_a_script_that_is_ignored_is_not_a_misspelling(here: Path, listed: str, sends: str) -> None:
    (here / ".gitignore").write_text(listed)
    (line,) = problems(Given("src/train.py"))
    assert line == (
        "spec.entrypoint.script: 'src/train.py' is left out, because git or .ddpjobignore ignores it; add "
        f"`{sends}` to .ddpjobignore"
    )
    (here / ".ddpjobignore").write_text(f"{sends}\n")
    code = read_given(Given("src/train.py")).code
    assert code is not None
    assert "src/train.py" in code.paths


def test_a_script_in_a_folder_within_one_that_is_ignored_names_the_outer_one(here: Path) -> None:
    (here / "src" / "lib").mkdir()
    (here / "src" / "lib" / "train.py").write_text("print(2)")
    (here / ".gitignore").write_text("lib/\n")
    (line,) = problems(Given("src/lib/train.py"))
    assert line.endswith("add `!src/lib/` to .ddpjobignore")
    (here / ".gitignore").write_text("lib/\nsrc/\n")
    (line,) = problems(Given("src/lib/train.py"))
    assert line.endswith("add `!src/` to .ddpjobignore")


def test_a_requirements_file_may_be_named_by_any_path_that_leads_to_it(here: Path) -> None:
    for path in ("./requirements.txt", str(here / "requirements.txt"), "src/../requirements.txt"):
        found = read_given(Given("src/train.py", options={"requirements": path})).content
        assert found["spec"]["code"]["requirements"] == "requirements.txt"
    here.with_name(f"{here.name}.txt").write_text("tqdm")
    outside = problems(Given("src/train.py", options={"requirements": f"../{here.name}.txt"}))
    assert "remove `..`" in "\n".join(outside)


@pytest.mark.parametrize("path", ["./src/train.py", "src//train.py", "newest/train.py"])
def test_a_path_in_a_file_that_is_not_as_packed_is_not_said_to_be_ignored(here: Path, path: str) -> None:
    (here / "newest").symlink_to("src")
    (here / "job.yaml").write_text(yaml.safe_dump(job(code={"path": "."}, entrypoint={"script": path})))
    (line,) = check_files(["job.yaml"]).problems
    assert line.endswith(f"spec.entrypoint.script: {path!r} is src/train.py of that folder; write its path so")


def test_a_program_in_place_of_the_path_of_a_script_is_not_in_the_folder(here: Path) -> None:
    program = "import torch\n" + "print(torch.ones(2))\n" * 40
    (here / "job.yaml").write_text(yaml.safe_dump(job(code={"path": "."}, entrypoint={"script": program})))
    (line,) = check_files(["job.yaml"]).problems
    assert "spec.entrypoint.script: 'import torch\\nprint" in line
    assert line.endswith(" is not in .; write its path in that folder")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            {"path": "nowhere"},
            "job.yaml:10: spec.code.path: nowhere: is not a folder; name the one that has the script",
        ),
        ({"path": "~no-such-user/x"}, "spec.code.path: ~no-such-user/x: is not a folder; name the one"),
        ({"path": 7}, "job.yaml:10: spec.code.path: 7 is not a path"),
        ({"path": "n" * 300}, "nnn: File name too long; name the folder that has the script"),
        ({"path": ".", "sha256": "0"}, "job.yaml:10: spec.code.path: '.' is packed now, and sha256 is of packed code"),
        (
            {"path": ".", "requirement": "a"},
            "spec.code.requirement: is not a field of a DDPJob; did you mean requirements",
        ),
        ({}, "spec.code.configMaps: is missing; `ddpjob submit` and `ddpjob run` set it"),
    ],
)
def test_what_is_wrong_with_the_code_of_a_file_has_its_line(here: Path, code: dict[str, Any], said: str) -> None:
    (here / "job.yaml").write_text(yaml.safe_dump(job(nodes=1, code=code), sort_keys=False))
    assert said in "\n".join(check_files(["job.yaml"]).problems)


def test_a_folder_is_relative_to_the_file_that_names_it(here: Path) -> None:
    (here / "src" / "job.yaml").write_text(yaml.safe_dump(job(code={"path": ".."})))
    assert check_files(["src/job.yaml"]).problems == ()
    submission = read_job("src/job.yaml")
    assert submission.code is not None
    assert "src/train.py" in submission.code.paths
