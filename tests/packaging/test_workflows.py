"""What cannot run here: .github and the hooks. They are linted, and each step of work is a make target that exists. The
steps in which a release is named by digest and signed do run, with nobody to publish to.
"""

from __future__ import annotations

import json
import os
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
from tests.support.tiers import program

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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_that_makes_something_names_the_index_of_torch_and_has_time_for_its_environment(path: Path) -> None:
    """Each target that runs Python installs torch first; without an index that is the build with CUDA, of gigabytes."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["env"]["TORCH_INDEX"] == "${{ vars.TORCH_INDEX_URL }}"
    short = [name for name, job in workflow["jobs"].items() if set(made(job)) and job["timeout-minutes"] < 20]
    assert short == []


def test_a_pull_request_is_scanned_and_each_kind_of_dependency_followed() -> None:
    ci = yaml.safe_load((GITHUB / "workflows" / "ci.yaml").read_text())
    assert "scan" in {target for job in ci["jobs"].values() for target in made(job)}
    assert "pull_request" in ci[True], "YAML 1.1 reads the key `on` so"
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    folders = {item["package-ecosystem"]: item.get("directories") or [item["directory"]] for item in updates}
    assert folders.items() >= {"pip": ["/", "/requirements"], "github-actions": ["/"]}.items()
    assert folders["docker"] == ["/", "/trainer_image"]
    assert all(any((ROOT / folder.strip("/")).glob("*ockerfile")) for folder in folders["docker"])


# The steps of a release run here as they are written, with programs of these names that say what they were asked.

DIGEST = f"sha256:{'a' * 64}"
STAND_IN = r"""#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
  *imagetools\ inspect\ --raw*) echo "$MANIFESTS" ;;
  # the index that one platform was pushed as
  *imagetools\ inspect*-a??64\ *) echo "sha256:$(printf 'b%.0s' {1..64})" ;;
  *imagetools\ inspect*) echo "$ANSWER" ;;
  push*) echo "Digest: $ANSWER" ;;
esac
"""


def release_job(name: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "release.yaml").read_text())["jobs"][name]
    return job


def ran(folder: Path, job: str, step: str, *, answer: str = DIGEST, **env: str) -> tuple[int, list[str], str]:
    """Exit status, calls and outputs of the step of this id or name, as a runner of GitHub would run it."""
    (script,) = [item["run"] for item in release_job(job)["steps"] if step in (item.get("id"), item.get("name"))]
    for name in ("docker", "cosign", "helm"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    (folder / "dist").mkdir()
    (folder / "Dockerfile").write_bytes((ROOT / "Dockerfile").read_bytes())
    calls, output = folder / "calls", folder / "output"
    calls.touch()
    output.touch()
    env |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "ANSWER": answer,
        "GITHUB_OUTPUT": str(output),
    }
    done = subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, calls.read_text().splitlines(), output.read_text()


@pytest.mark.parametrize("answer", ["", "3.12-slim", "sha256:short", f"{DIGEST}0"])
def test_a_release_without_the_digest_of_its_base_stops(tmp_path: Path, answer: str) -> None:
    status, _, output = ran(tmp_path, "version", "base", answer=answer)
    assert (status, output) == (1, "")


def test_all_images_of_a_release_are_built_on_one_base_by_its_digest(tmp_path: Path) -> None:
    tag = re.findall(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert ran(tmp_path, "version", "base")[::2] == (0, f"image={tag[0]}@{DIGEST}\n")
    assert release_job("version")["outputs"]["base"] == "${{ steps.base.outputs.image }}"
    images = release_job("images")
    assert "version" in images["needs"]
    assert images["env"]["BASE_IMAGE"] == "${{ needs.version.outputs.base }}"
    assert "images" in set(made(images))


def joined(**digests: str) -> str:
    """The index of a release, each of whose platforms has an attestation of its build beside it."""
    manifests = [
        {"digest": digest, "platform": {"architecture": platform, "os": "linux"}}
        for platform, digest in digests.items()
    ]
    attestation = {"digest": f"sha256:{'f' * 64}", "platform": {"architecture": "unknown", "os": "unknown"}}
    return json.dumps({"manifests": [entry for manifest in manifests for entry in (manifest, attestation)]})


OF_A_PLATFORM = {"amd64": f"sha256:{'c' * 64}", "arm64": f"sha256:{'d' * 64}"}
OF_AN_IMAGE = {"PLATFORMS": "amd64 arm64", "IMAGE": "registry.example/trainer", "TAG": "1-cpu", "NAME": "trainer"}


def test_each_image_is_signed_by_its_digest_and_has_an_sbom_for_each_platform(tmp_path: Path) -> None:
    """An SBOM belongs to the digest that nodes pull: that of the platform's manifest in the signed index."""
    program("images", "jq")
    env = {**OF_AN_IMAGE, "MANIFESTS": joined(**OF_A_PLATFORM)}
    status, calls, output = ran(tmp_path, "publish-images", "index", **env)
    image = "registry.example/trainer"
    attest = "cosign attest --yes --type spdxjson --predicate trainer-1-cpu"
    assert (status, output) == (0, f"digest={DIGEST}\n")
    assert f"docker buildx imagetools inspect --raw {image}@{DIGEST}" in calls
    assert [call for call in calls if call.startswith("cosign")] == [
        f"cosign sign --yes --recursive {image}@{DIGEST}",
        f"{attest}-amd64.spdx.json {image}@{OF_A_PLATFORM['amd64']}",
        f"{attest}-arm64.spdx.json {image}@{OF_A_PLATFORM['arm64']}",
    ]
    assert {"images", "sbom"} <= set(made(release_job("images")))


def test_an_image_without_a_manifest_for_a_platform_gets_no_sbom_for_it(tmp_path: Path) -> None:
    program("images", "jq")
    env = {**OF_AN_IMAGE, "MANIFESTS": joined(amd64=OF_A_PLATFORM["amd64"])}
    status, calls, output = ran(tmp_path, "publish-images", "index", **env)
    assert (status, output) == (1, "")
    assert [call for call in calls if "arm64.spdx.json" in call] == []


def test_the_chart_is_signed_by_the_digest_that_was_pushed(tmp_path: Path) -> None:
    env = {"REGISTRY": "registry.example", "VERSION": "1.2.3"}
    status, calls, _ = ran(tmp_path, "release", "Push the chart, and sign its digest", **env)
    assert (status, calls[-1]) == (0, f"cosign sign --yes registry.example/charts/ddpjob-operator@{DIGEST}")


@pytest.mark.parametrize(
    ("job", "subject"),
    [("publish-images", "${{ steps.index.outputs.digest }}"), ("release", "dist/*.whl\ndist/*.tgz\ndist/*.tar.gz\n")],
)
def test_what_is_published_has_its_provenance(job: str, subject: str) -> None:
    (attest,) = [step for step in release_job(job)["steps"] if step.get("uses", "").startswith("actions/attest@")]
    assert subject in attest["with"].values()
    assert release_job(job)["permissions"].items() >= {"id-token": "write", "attestations": "write"}.items()


def test_each_hook_runs_a_program_of_the_virtual_environment() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]  # nothing is downloaded
    hooks = [hook for hook in repositories[0]["hooks"] if hook["language"] == "system"]
    names = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert names == {"ruff", "mypy", "lint-imports", "python", "hadolint", "actionlint"}
    assert [name for name in names if not (BIN / name).exists()] == []


@pytest.mark.parametrize(("subject", "refused"), [("x" * 72, False), ("x" * 73, True), ("short\n\n" + "x" * 90, False)])
def test_the_hook_for_subjects_refuses_what_is_longer_than_72(subject: str, refused: bool) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook["id"] == "subject"]
    assert bool(re.search(hook["entry"], subject, re.MULTILINE)) is refused
