"""`RUN pip install` of an image that is built on the trainer's reaches the environment of the ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.packaging


def test_pip_is_that_of_the_environment_which_has_none_yet(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = tmp_path / "venv" / "bin" / "pip"
    shutil.copy(ROOT / "trainer_image" / "pip", pip)
    for _ in range(2):
        said = subprocess.run([pip, "--version"], capture_output=True, text=True, check=True).stdout
        assert f"from {tmp_path}/venv/lib" in said


def test_the_image_has_it_first_on_the_path() -> None:
    dockerfile = (ROOT / "trainer_image" / "Dockerfile").read_text()
    assert "COPY --chmod=755 trainer_image/pip /opt/venv/bin/pip\nENV PATH=/opt/venv/bin:$PATH" in dockerfile
