"""Writes charts/ddpjob-operator/files/dashboards, one file for each dashboard of this folder.

`python charts/dashboards` writes them; with `--check` it ends with 1 if one differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cost import COST
from failures import FAILURES
from fleet import FLEET
from gpus import GPUS
from job import ONE_JOB

from ddpjob_operator.api import generated

FILES = Path(__file__).parents[1] / "ddpjob-operator" / "files" / "dashboards"
DASHBOARDS = (FLEET, ONE_JOB, FAILURES, GPUS, COST)


if __name__ == "__main__":
    sys.exit(generated.write({FILES / f"{page.name}.json": page.json() for page in DASHBOARDS}, sys.argv[1:]))
