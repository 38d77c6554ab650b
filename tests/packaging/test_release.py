"""What a release is checked for, and what it is made of; the workflow only publishes it."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / "release" / "release.py"))
NAMING = ("pyproject.toml", "CHANGELOG.md", "charts/ddpjob-operator/Chart.yaml", *RELEASE["IMAGES_NAMED"])


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return RELEASE


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that name a version."""
    for name in NAMING:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_files_name_the_version_of_pyproject(release: dict[str, Any]) -> None:
    assert list(release["disagreements"](f"v{release['version']()}")) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"', ["pyproject.toml says 0.2.0, the tag 0.1.0"]),
        (
            "charts/ddpjob-operator/Chart.yaml",
            "\nversion: 0.1.0",
            "\nversion: 0.2.0",
            ["Chart.yaml: version says 0.2.0, the tag 0.1.0"],
        ),
        (
            "manifests/base/deployment.yaml",
            "ddpjob-trainer:0.1.0-cpu",
            "ddpjob-trainer:0.0.9-cpu",
            ["manifests/base/deployment.yaml: ddpjob-trainer says 0.0.9, the tag 0.1.0"],
        ),
        (
            "operator/ddpjob_operator/settings.py",
            "ddpjob-trainer:0.1.0-cpu",
            "ddpjob-trainer:0.1.0-rc.2-cpu",
            ["operator/ddpjob_operator/settings.py: ddpjob-trainer says 0.1.0-rc.2, the tag 0.1.0"],
        ),
        ("CHANGELOG.md", "## [0.1.0] - ", "## [0.1.0] ", ["CHANGELOG.md has no section [0.1.0] with a date"]),
    ],
)
def test_a_file_that_names_another_version_is_named(
    release: dict[str, Any], tree: Path, file: str, old: str, new: str, said: list[str]
) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert list(release["disagreements"]("v0.1.0", tree)) == said


def test_a_release_candidate_is_a_version_as_any(release: dict[str, Any], tree: Path) -> None:
    for name in NAMING:
        (tree / name).write_text((tree / name).read_text().replace("0.1.0", "0.2.0-rc.1"))
    assert list(release["disagreements"]("v0.2.0-rc.1", tree)) == []


def test_the_plugin_of_a_release_candidate_has_the_wheel_by_its_own_name(
    release: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(release["package_plugin"].__globals__, "version", lambda: "0.2.0-rc.1")
    (tmp_path / "ddpjob-0.2.0rc1-py3-none-any.whl").write_text("wheel")  # as pip builds it
    assert release["package_plugin"](tmp_path).name == "kubectl-ddpjob-0.2.0-rc.1.tar.gz"


def test_a_release_candidate_is_not_published_as_the_latest_release() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]["release"]["steps"]
    (made,) = [step["run"] for step in steps if "gh release create" in step.get("run", "")]
    code = f'gh() {{ echo "$@"; }}; {made[made.index("prerelease=") :]}'
    for tag, marked in (("v0.2.0-rc.1", True), ("v0.2.0", False)):
        env = {"GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], env=env, capture_output=True, text=True)
        assert (done.returncode, "--prerelease" in done.stdout) == (0, marked), done.stderr


def test_the_notes_are_the_section_of_one_version(release: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n"
        "## [0.2.0] - 2027-01-02\n\n### Added\n- New.\n\n"
        "## [0.1.0] - 2026-01-02\n- Old.\n"
    )
    assert release["section"]("0.2.0", tmp_path) == "### Added\n- New."
    assert release["section"]("0.1.0", tmp_path) == "- Old."
    assert release["section"]("0.1", tmp_path) == ""


def test_notes_that_github_would_refuse_end_with_a_whole_entry(release: dict[str, Any], tmp_path: Path) -> None:
    entries = [f"- Entry {number}\n  in two lines." for number in range(8_000)]
    heading = "## [0.2.0] - 2027-01-02\n\n### Fixed\n\n#### First\n"
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(heading + "\n".join(entries) + "\n")
    notes = release["notes"]("0.2.0", tmp_path)
    *kept, last = notes.splitlines()
    assert 123_000 < len(notes) <= release["NOTES_CHARACTERS"]
    assert (kept[-2], last) == ("  in two lines.", "The rest is in CHANGELOG.md of the tag v0.2.0.")
    changelog.write_text(heading + "- Only.\n")
    assert release["notes"]("0.2.0", tmp_path) == "### Fixed\n\n#### First\n- Only."


def test_the_packaged_chart_is_whole(release: dict[str, Any], tmp_path: Path) -> None:
    archive = release["package_chart"](tmp_path)
    assert archive.name == f"ddpjob-operator-{release['version']()}.tgz"
    with (
        helm.Chart.load_archive(archive.read_bytes()) as packaged,
        helm.Chart.load(ROOT / "charts" / "ddpjob-operator") as source,
    ):
        assert packaged.render({}, name="a", namespace="b") == source.render({}, name="a", namespace="b")


def test_the_chart_of_a_release_takes_the_images_of_that_release(release: dict[str, Any], tmp_path: Path) -> None:
    """Those of the repository's chart are built by whoever installs it."""
    archive = release["package_chart"](tmp_path, "ghcr.io/owner")
    with helm.Chart.load_archive(archive.read_bytes()) as packaged:
        texts = packaged.render({}, name="a", namespace="b")
        deployment = yaml.safe_load(texts["ddpjob-operator/templates/deployment.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"ghcr.io/owner/ddpjob-operator:{release['version']()}"
    assert {
        "name": "DDPJOB_OPERATOR_TRAINER_IMAGE",
        "value": f"ghcr.io/owner/ddpjob-trainer:{release['version']()}-cpu",
    } in (container["env"])
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]["release"]["steps"]
    (made,) = [step["run"] for step in steps if "chart-package" in step.get("run", "")]
    assert 'REGISTRY="$REGISTRY"' in made


def packed(release: dict[str, Any], folder: Path) -> Path:
    """The plugin for krew, with a wheel that is none, unpacked as krew does."""
    (folder / f"ddpjob-{release['version']()}-py3-none-any.whl").write_text("wheel")
    archive = release["package_plugin"](folder)
    store = folder / "store"
    store.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(store)], check=True)
    return store


def test_the_plugins_manifest_names_version_and_checksum(release: dict[str, Any], tmp_path: Path) -> None:
    packed(release, tmp_path)
    version = release["version"]()
    manifest = yaml.safe_load((tmp_path / "ddpjob.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    archive = tmp_path / f"kubectl-ddpjob-{version}.tar.gz"
    assert (manifest["metadata"]["name"], manifest["spec"]["version"]) == ("ddpjob", f"v{version}")
    assert platform["uri"].endswith(f"/v{version}/{archive.name}")
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (tmp_path / "store" / platform["bin"]).stat().st_mode & 0o100


def test_the_plugin_installs_its_wheel_once_and_passes_arguments_and_exit_code(
    release: dict[str, Any], tmp_path: Path
) -> None:
    store, bin_, calls = packed(release, tmp_path), tmp_path / "bin", tmp_path / "calls"
    bin_.mkdir()
    python = bin_ / "python3"  # which makes environments whose program ends with 7
    python.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"
  printf '#!/bin/sh\\necho "asked: $*"; exit 7\\n' >"$3/bin/kubectl-ddpjob"; chmod +x "$3/bin/kubectl-ddpjob" ;;
"-m pip") echo "$@" >>{calls} ;;
esac
"""
    )
    python.chmod(0o755)
    plugin = bin_ / "kubectl-ddpjob"
    plugin.symlink_to(store / "kubectl-ddpjob")  # as krew does
    env = {"PATH": f"{bin_}:{os.environ['PATH']}"}
    for _ in range(2):
        done = subprocess.run([plugin, "why", "digits"], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, "asked: why digits\n")
    (installed,) = calls.read_text().splitlines()
    assert installed.endswith(f"{store}/ddpjob-{release['version']()}-py3-none-any.whl[cli]")
    link = store / "environment" / "bin" / "python"
    link.unlink()
    link.symlink_to(tmp_path / "python3.11")  # of a Python that is gone, as after an upgrade
    done = subprocess.run([plugin, "why", "digits"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "asked: why digits\n")
    assert calls.read_text().splitlines() == [installed] * 2
