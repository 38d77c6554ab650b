"""Mutation testing of the operator's core: change one expression at a time, and see whether a test of core notices.

    python -m tests.mutation                   all of core: hours of processor time
    python -m tests.mutation failure.budget stages.deadlines    these modules of core

mutmut works on a copy in build/mutation. A mutant that survives is a test that is missing, or it stands in
survivors.toml with the reason why no test can or should tell it from the original. Exits 1 if one does not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build" / "mutation"
KNOWN: Final = Path(__file__).with_name("survivors.toml")
PACKAGE: Final = "ddpjob_operator.core"

SURVIVED: Final = ("survived", "no tests")

SETTINGS: Final = """
[tool.mutmut]
source_paths = ["src/ddpjob_operator/core"]
only_mutate = {only}
also_copy = ["src", "tests", "conftest.py", "pyproject.toml"]
pytest_add_cli_args_test_selection = ["tests/unit/core"]
timeout_constant = 30.0

[tool.pytest.ini_options]
addopts = ["--import-mode=importlib", "-p", "no:cacheprovider"]
pythonpath = ["src", "."]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
"""
CONFTEST: Final = """
from hypothesis import HealthCheck, settings

# the same examples for each mutant, and fewer than in the tests' own runs
settings.register_profile(
    "mutants", derandomize=True, deadline=None, max_examples=30, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("mutants")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that no test noticed. Its number in mutmut is not used: it changes with the lines above."""

    function: str
    before: str
    after: str


def main(modules: Sequence[str]) -> int:
    prepare(modules)
    with (WORK / "mutmut.log").open("w") as log:  # a spinner, for the most part
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(os.cpu_count())]
        subprocess.run(command, cwd=WORK, stdout=log, stderr=log, check=True)
    became = results()
    found = {mutant for name, result in became.items() if result in SURVIVED and (mutant := shown(name)) is not None}
    known = {
        Mutant(entry["function"], entry["before"], entry["after"]): entry["reason"]
        for entry in tomllib.loads(KNOWN.read_text())["survivor"]
    }
    new = sorted(found - known.keys(), key=repr)
    for mutant in new:
        print(f'\n[[survivor]]\nfunction = "{mutant.function}"\nbefore = {mutant.before!r}\nafter = {mutant.after!r}')
    print(f"\n{len(became)} mutants, {len(found)} survived, {len(new)} without a reason in {KNOWN.relative_to(ROOT)}")
    return 1 if new else 0


def prepare(modules: Sequence[str]) -> None:
    """A project of its own in WORK: core and its tests."""
    shutil.rmtree(WORK, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "operator" / "ddpjob_operator", WORK / "src" / "ddpjob_operator", ignore=ignore)
    for folder in ("unit/core", "support"):
        shutil.copytree(ROOT / "tests" / folder, WORK / "tests" / folder, ignore=ignore)
    only = [f"src/ddpjob_operator/core/{module.replace('.', '/')}.py" for module in modules]
    (WORK / "pyproject.toml").write_text(SETTINGS.format(only=only or ["src/ddpjob_operator/core/*"]))
    (WORK / "conftest.py").write_text(CONFTEST)


def results() -> dict[str, str]:
    """What became of each mutant, by mutmut's name for it."""
    command = [sys.executable, "-m", "mutmut", "results", "--all", "true"]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=True)
    pairs = (line.strip().partition(": ") for line in done.stdout.splitlines())
    return {name: result for name, _, result in pairs if result}


def shown(name: str) -> Mutant | None:
    """What mutmut changed; None where both sides are the same but for layout."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name], cwd=WORK, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    before = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    after = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    function = name.rpartition("__mutmut_")[0].removeprefix(f"{PACKAGE}.")
    return Mutant(function, " ".join(before), " ".join(after)) if before != after else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
