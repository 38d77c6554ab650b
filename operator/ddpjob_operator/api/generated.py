"""Files of the repository that a program writes from its tables: the CRD, pages of docs/, roles, the chart's README."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]


def write(files: Mapping[Path, str], argv: Sequence[str]) -> int:
    """Write each file that differs from its text; with `--check` in argv, name it and return 1 instead."""
    stale = [path for path, text in files.items() if not (path.exists() and path.read_text() == text)]
    check = "--check" in argv
    for path in stale:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        if check:
            print(f"{name} is out of date; run `make generate`", file=sys.stderr)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
        print(f"wrote {name}")
    return 1 if check and stale else 0
