"""What a release is checked for, and what it is made of; the workflow only publishes it."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest

ROOT = Path(__file__).parents[2]
NAMING = ("pyproject.toml", "CHANGELOG.md", "charts/ddpjob-operator/Chart.yaml", "manifests/base/deployment.yaml")


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "release" / "release.py"))


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


def test_the_notes_are_the_section_of_one_version(release: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n"
        "## [0.2.0] - 2027-01-02\n\n### Added\n- New.\n\n"
        "## [0.1.0] - 2026-01-02\n- Old.\n"
    )
    assert release["section"]("0.2.0", tmp_path) == "### Added\n- New."
    assert release["section"]("0.1.0", tmp_path) == "- Old."
    assert release["section"]("0.1", tmp_path) == ""


def test_the_packaged_chart_is_whole(release: dict[str, Any], tmp_path: Path) -> None:
    archive = release["package_chart"](tmp_path)
    assert archive.name == f"ddpjob-operator-{release['version']()}.tgz"
    with (
        helm.Chart.load_archive(archive.read_bytes()) as packaged,
        helm.Chart.load(ROOT / "charts" / "ddpjob-operator") as source,
    ):
        assert packaged.render({}, name="a", namespace="b") == source.render({}, name="a", namespace="b")
