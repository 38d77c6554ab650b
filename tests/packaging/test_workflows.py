"""What cannot run here: .github and the hooks. They are linted, and each step of work is a make target that exists."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yaml"))
BIN = Path(sys.executable).parent
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

pytestmark = pytest.mark.packaging


def lint(program: str, *arguments: str | Path) -> None:
    done = subprocess.run([BIN / program, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="actionlint has no wheel for this platform",
)
def test_actionlint_finds_nothing() -> None:
    lint("actionlint", *WORKFLOWS)


def test_zizmor_finds_nothing() -> None:
    lint("zizmor", "--offline", "--no-progress", "--persona=pedantic", "--strict-collection", GITHUB)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", "workflows/*.yaml"),
        ("vendor.dependabot", "dependabot.yml"),
        ("vendor.github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_a_file_follows_its_schema(schema: str, files: str) -> None:
    found = sorted(GITHUB.glob(files))
    assert found
    lint("check-jsonschema", "--builtin-schema", schema, *found)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.stem}: {name}", job


def made(job: dict[str, Any]) -> Iterator[str]:
    """The targets that a job makes, each value of its matrix in turn."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job.get("steps", []):
        for line in step.get("run", "").splitlines():
            if line.startswith("make "):
                for word in shlex.split(line)[1:]:
                    if "=" not in word:
                        yield from (word.replace("$TIER", tier) for tier in matrix.get("tier", [""]))


def test_each_make_target_of_a_workflow_exists() -> None:
    asked = {target for _, job in jobs() for target in made(job)}
    assert asked >= {"lint", "check", "test-api", "test-cluster", "wheel", "chart-package", "sbom"}
    assert asked - TARGETS == set()


def test_each_tier_of_the_tests_runs_in_a_workflow() -> None:
    asked = {target for _, job in jobs() for target in made(job)}
    elsewhere = {"test-unit", "test-gpu"}  # make check has the one; runners have no GPU for the other
    tiers = {target for target in TARGETS if target.startswith("test-")} - elsewhere
    assert tiers - asked == set()


def test_a_job_has_a_time_limit_and_only_rights_that_it_names() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {}
    for name, job in jobs():
        assert "permissions" in job, name
        assert "timeout-minutes" in job or "uses" in job, name


def test_each_hook_runs_a_program_of_the_virtual_environment() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]  # nothing is downloaded
    programs = [hook["entry"].split()[0] for hook in repositories[0]["hooks"] if hook["language"] == "system"]
    assert len(programs) >= 8
    assert [program for program in programs if not (BIN / Path(program).name).exists()] == []


@pytest.mark.parametrize(("subject", "refused"), [("x" * 72, False), ("x" * 73, True), ("short\n\n" + "x" * 90, False)])
def test_the_hook_for_subjects_refuses_what_is_longer_than_72(subject: str, refused: bool) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook["id"] == "subject"]
    assert bool(re.search(hook["entry"], subject, re.MULTILINE)) is refused
