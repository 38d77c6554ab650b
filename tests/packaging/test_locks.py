"""The lock files: whatever pyproject.toml asks for is in them, in a version that it allows, with a hash."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
TORCH = canonicalize_name("torch")
PYTHONS = [entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", entry)]

ASKED = {
    "operator.txt": [*PROJECT["dependencies"], *EXTRAS["operator"]],
    "trainer.txt": [*PROJECT["dependencies"], *EXTRAS["trainer"], *EXTRAS["data"]],
    "dev.txt": [
        *PROJECT["dependencies"],
        *(entry for name, extra in EXTRAS.items() if name != "gpu" for entry in extra),
    ],
    "torch-cuda.txt": EXTRAS["gpu"],
    "libraries.txt": PYPROJECT["dependency-groups"]["libraries"],
    "scan.txt": PYPROJECT["dependency-groups"]["scan"],
}


def locked(name: str) -> dict[str, str]:
    """Versions by package."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [re.match(r"([a-z0-9.-]+)===?([^ ;]+)", line) for line in lines]
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


@pytest.mark.parametrize("file", ASKED)
def test_a_lock_has_all_that_is_asked_for_in_a_version_that_is_allowed(file: str) -> None:
    versions = locked(file) | locked("torch.txt")
    wrong = []
    for requirement in map(Requirement, ASKED[file]):
        if requirement.name == PROJECT["name"]:
            continue
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            wrong.append(f"{requirement} (locked: {version})")
    assert wrong == [], "run requirements/refresh.sh"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_development_lock_has_what_its_packages_need_on_each_python(python: str) -> None:
    """A package such as libcst asks for another YAML parser on Python 3.13, and pip installs nothing without a hash."""
    there = locked("dev.txt").keys() | locked("torch-cuda.txt").keys()
    missing = []
    for package in locked("dev.txt"):
        try:
            needed = [Requirement(entry) for entry in requires(package) or []]
        except PackageNotFoundError:  # of another Python than this one
            continue
        missing += [
            f"{package} needs {requirement}"
            for requirement in needed
            if canonicalize_name(requirement.name) not in there and is_needed(requirement, python)
        ]
    assert missing == [], "run requirements/refresh.sh"


def is_needed(requirement: Requirement, python: str) -> bool:
    """On Linux, where no extra was asked for."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(here)


@pytest.mark.parametrize("file", [*ASKED, "torch-cpu.txt"])
def test_every_package_of_a_lock_has_a_hash(file: str) -> None:
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements" / file).read_text().strip())
    packages = [block for block in blocks if not block.startswith("#")]
    assert packages
    assert [block for block in packages if "--hash=sha256:" not in block] == []


def test_the_images_share_no_framework() -> None:
    assert not {"kopf", "kubernetes"} & locked("trainer.txt").keys()
    assert TORCH not in locked("operator.txt")


def test_all_locks_agree_on_a_version() -> None:
    development = locked("dev.txt")
    for file in ("operator.txt", "trainer.txt"):
        differing = {
            name: (version, development.get(name))
            for name, version in locked(file).items()
            if development.get(name) != version
        }
        assert differing == {}, file


def test_what_is_installed_without_dependencies_adds_to_the_development_lock_and_brings_no_torch() -> None:
    assert not locked("libraries.txt").keys() & (locked("dev.txt").keys() | locked("torch-cuda.txt").keys())


@pytest.mark.parametrize("file", ["torch-cpu.txt", "torch-cuda.txt"])
def test_both_builds_of_torch_are_of_the_same_version(file: str) -> None:
    assert locked(file)[TORCH].split("+")[0] == locked("torch.txt")[TORCH]


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_a_lock_names_no_index(path: Path) -> None:
    assert not re.search(r"^--|https?:|file:", path.read_text(), re.MULTILINE)
