"""Goodput by restart scope and by snapshot interval, simulated: `python -m tests.simulation`, or `make simulate`.

Writes docs/goodput.json and, from it, the tables and pictures of docs/goodput.md. Takes seven minutes on one core.
`--draw` writes tables and pictures from the figures that are there; `--check` ends with 1 if they are out of date.
The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.simulation import document
from tests.simulation.parameters import SEEDS

from ddpjob_operator.api import generated


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="runs of each, with seeds from 1 (%(default)s)")
    parser.add_argument("--draw", action="store_true", help="simulate nothing")
    parser.add_argument("--check", action="store_true", help="simulate and write nothing")
    given = parser.parse_args(argv)
    if not (given.draw or given.check):
        from tests.simulation import figures

        begun = time.monotonic()
        found = figures.measure(range(1, given.seeds + 1), lambda line: print(line, file=sys.stderr, flush=True))
        document.FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {document.FIGURES.name} after {time.monotonic() - begun:.0f} s")
    return generated.write(document.files(), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
