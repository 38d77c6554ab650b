"""`make prove`: what the trainer promises about its arithmetic, shown by real runs.

    python -m tests.prove [--only agreement] [--write]

Exit code 1 if any figure is beyond its limit, or a run did not come to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from tests.prove import document
from tests.prove.tables import show
from tests.prove.training import Untrained


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(document.PROOFS), help="this proof; may be repeated")
    parser.add_argument("--write", action="store_true", help="write docs/correctness.md, if all of it holds")
    options = parser.parse_args()
    chosen = options.only or list(document.PROOFS)
    if options.write and set(chosen) != set(document.PROOFS):
        parser.error("--write needs all proofs: the document is of one run; leave --only out")
    # a table that is cut to 80 columns cannot be read in a log
    console = Console(width=None if sys.stdout.isatty() else 190)
    folder = Path(tempfile.mkdtemp(prefix="ddpjob-prove-"))
    try:
        return _prove(chosen, folder, console, write=options.write)
    finally:
        shutil.rmtree(folder)


def _prove(chosen: list[str], folder: Path, console: Console, *, write: bool) -> int:
    began = time.monotonic()
    measured, wrong = {}, []
    for name in chosen:
        proof, rows, since = document.PROOFS[name], [], time.monotonic()
        title, _ = document.heading(proof)
        try:
            for row in proof.measure(folder / name):
                rows.append(row)
                console.print(f"[dim]{time.monotonic() - began:4.0f} s  {title}: run {len(rows)}[/dim]")
        except Untrained as untrained:
            wrong.append(f"{title}: {untrained}")
            continue
        finally:
            shutil.rmtree(folder / name, ignore_errors=True)
        measured[name] = tuple(rows)
        wrong += [f"{title}: {problem}" for problem in proof.violations(rows)]
        console.rule(f"{title}, {time.monotonic() - since:.0f} s")
        for table in proof.tables(rows):
            show(table, console)
    for problem in wrong:
        console.print(problem, style="bold red", markup=False)
    console.print(f"{len(chosen)} proofs, {len(wrong)} violations, {time.monotonic() - began:.0f} s")
    if write and not wrong:
        document.write(document.Figures(torch=torch.__version__, **measured))
        console.print(f"written: {document.DOCUMENT}, {document.FIGURES}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
