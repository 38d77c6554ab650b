"""What is in the images: who they run as, how they start, what they carry and what they must not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiers import cannot_run
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "cluster" / "images.sh"
BUILD_SECONDS = 1800
"""The first build on a machine makes a base image and fetches every package."""

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(BUILD_SECONDS + 60)]


@dataclass(frozen=True)
class Image:
    """An image as images.sh leaves it: a `docker save` archive or an OCI layout."""

    reference: str
    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        manifest = self._manifest
        found: dict[str, Any] = json.loads(self._read(manifest["Config"]))["config"]
        return found

    @property
    def files(self) -> frozenset[str]:
        """Names of all files of all layers, without the leading slash."""
        return frozenset(name for name, member in self.members.items() if not member.isdir())

    @cached_property
    def members(self) -> dict[str, tarfile.TarInfo]:
        """Files and folders of all layers, by their names without the leading slash."""
        found: dict[str, tarfile.TarInfo] = {}
        for layer in self._manifest["Layers"]:
            if self.path.is_dir():
                with tarfile.open(self.path / layer) as content:
                    found.update((member.name.removeprefix("./"), member) for member in content)
            else:
                with tarfile.open(self.path) as archive, tarfile.open(fileobj=archive.extractfile(layer)) as content:
                    found.update((member.name.removeprefix("./"), member) for member in content)
        return found

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        """Paths of the configuration and of the layers, in the words of a `docker save` archive."""
        if not self.path.is_dir():
            found: dict[str, Any] = json.loads(self._read("manifest.json"))[0]
            return found
        index = json.loads(self._read("index.json"))
        manifest = json.loads(self._read(_blob(index["manifests"][0]["digest"])))
        return {
            "Config": _blob(manifest["config"]["digest"]),
            "Layers": [_blob(layer["digest"]) for layer in manifest["layers"]],
        }

    def _read(self, name: str) -> bytes:
        if self.path.is_dir():
            return (self.path / name).read_bytes()
        with tarfile.open(self.path) as archive:
            file = archive.extractfile(name)
            assert file is not None, name
            return file.read()


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    """Both images of this working tree, by name."""
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode == 3:
        cannot_run("images", done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    built = [line.split() for line in done.stdout.splitlines()]
    return {re.sub(r"localhost/ddpjob-|:.*", "", ref): Image(ref, Path(path)) for ref, path in built}


def test_without_an_index_of_the_cpu_build_of_torch_nothing_is_built(tmp_path: Path) -> None:
    """As on any machine that has Docker and no settings of pip: PyPI has the build with CUDA alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "DDPJOB_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([SCRIPT, "trainer"], env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if done.returncode == 3:
        cannot_run("images", done.stderr.strip().splitlines()[-1])
    assert (done.returncode, done.stdout) == (2, "")
    assert "set TORCH_INDEX_URL to PyTorch's index of CPU builds, or TORCH=cuda" in done.stderr


DOCKER = r"""#!/bin/bash
case $1 in
  build) echo "attestations left out: $BUILDX_NO_DEFAULT_ATTESTATIONS" >>"$CALLS" ;;
  image) echo sha256:0 ;;
  save) touch "$3" ;;
esac
"""


def test_docker_adds_nothing_to_an_image_that_differs_with_each_build(tmp_path: Path) -> None:
    """The time of a build in an attestation gave an unchanged image a new digest, and its archive was written again."""
    docker, calls = tmp_path / "docker", tmp_path / "calls"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "DDPJOB_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = subprocess.run([SCRIPT, "operator"], env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert calls.read_text() == "attestations left out: 1\n"


ENTRYPOINTS = {
    "operator": ["python", "-m", "ddpjob_operator.main"],
    "trainer": ["python", "-m", "ddp_trainer.launch"],
}


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_image_runs_as_nobody_and_hears_sigterm(images: dict[str, Image], name: str) -> None:
    config = images[name].config
    assert config["User"] == "65532:65532"
    # a list and no shell in front, so that the signal reaches process 1
    assert config["Entrypoint"] == ENTRYPOINTS[name]
    assert not config.get("Cmd") or config["Cmd"] == ["python3"]
    assert config["StopSignal"] == "SIGTERM"


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_nobody_may_read_all_that_is_ours(images: dict[str, Image], name: str) -> None:
    """Also of a checkout with umask 077."""
    folders = ("opt/ddpjob/", "opt/venv/bin/pip")
    ours = {path: found for path, found in images[name].members.items() if path.startswith(folders)}
    assert len(ours) > 100
    needed = {path: 0o005 if found.isdir() else 0o004 for path, found in ours.items()}
    assert [path for path, found in ours.items() if found.mode & needed[path] != needed[path]] == []


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_image_says_what_it_is(images: dict[str, Image], name: str) -> None:
    labels = images[name].config["Labels"]
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert labels["org.opencontainers.image.title"] == f"ddpjob-{name}"
    assert labels["org.opencontainers.image.version"] == version[1]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.revision"]
    assert version[1] in images[name].reference


@pytest.mark.parametrize(
    ("name", "packages"),
    [("operator", {"torch", "ddp_trainer"}), ("trainer", {"kopf", "kubernetes", "ddpjob_operator"})],
)
def test_an_image_has_nothing_of_the_other(images: dict[str, Image], name: str, packages: set[str]) -> None:
    ours = {part for file in images[name].files if file.startswith("opt/") for part in file.split("/")[:-1]}
    assert len(ours) > 100
    assert ours & packages == set()


@pytest.mark.parametrize(("name", "package"), [("operator", "ddpjob_operator"), ("trainer", "ddp_trainer")])
def test_every_module_of_ours_is_compiled_since_nothing_can_be_written_later(
    images: dict[str, Image], name: str, package: str
) -> None:
    files = images[name].files
    modules = {file for file in files if file.startswith(f"opt/ddpjob/{package}/") and file.endswith(".py")}
    assert len(modules) >= 10
    compiled = {
        re.sub(r"__pycache__/(.+)\.cpython-\d+\.pyc$", r"\1.py", file) for file in files if "/__pycache__/" in file
    }
    assert modules - compiled == set()


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_image_carries_no_installer_cache_or_setting_of_its_builder(images: dict[str, Image], name: str) -> None:
    left = {
        file
        for file in images[name].files
        if file.startswith(("root/.cache/", "mnt/wheels/", "opt/pip/"))
        or file in {"etc/pip.conf", "etc/ssl/pip-ca.crt"}
    }
    assert {file for file in left if not file.rpartition("/")[2].startswith(".wh.")} == set()
