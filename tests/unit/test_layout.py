"""The repository's shape, where breaking it would break Python itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["operator", "trainer_image"])
def test_a_top_level_folder_is_no_package_so_that_the_standard_library_stays_importable(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.processes
def test_import_operator_from_the_repository_root_finds_the_standard_library() -> None:
    code = "import operator; print(operator.add(2, 3), operator.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("5 ")
    assert str(ROOT) not in done.stdout.removeprefix("5 ").strip() or ".venv" in done.stdout
