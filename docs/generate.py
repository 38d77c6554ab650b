"""Runs all programs that write files from tables and models, in one interpreter: each alone would import the operator's
models again.

`python docs/generate.py` writes them; with `--check` it names those that are out of date and ends with 1.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = ("ddpjob_operator.api.crd", "ddpjob_operator.api.docs")
SCRIPTS = (
    "docs/metrics.py",
    "docs/conditions.py",
    "docs/commands.py",
    "docs/validate_tables.py",
    "docs/reliability.py",
    "charts/readme.py",
    "charts/rbac.py",
    "charts/policies.py",
    "charts/dashboards",
)


def main(arguments: Sequence[str]) -> int:
    """1 if one of them has ended with another code than 0. The others run all the same."""
    codes = [ended(program, arguments) for program in (*MODULES, *SCRIPTS)]
    return int(any(codes))


def ended(program: str, arguments: Sequence[str]) -> str | int | None:
    """The code that this program has ended with."""
    sys.argv[:] = [program, *arguments]
    try:
        if program in MODULES:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
