"""Which job, which life of it, and where its files are: what the operator sets in the environment, or what
holds without it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path


def identity(environ: Mapping[str, str], *, name: str) -> dict[str, str]:
    """`environ` with what the operator would have set (docs/contracts.md section 2).

    Without it, under plain torchrun, each start is a new life of a job called `name` whose files are in
    ./shared.
    """
    local_module = {
        "DDPJOB_SHARED": str(Path.cwd() / "shared"),
        "DDPJOB_NAME": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "training",
        "DDPJOB_UID": "local",
        "DDPJOB_CREATED": str(int(time.time())),
        "DDPJOB_ATTEMPT": "0",
    }
    return {**local_module, **environ}


def log_directory(identity: Mapping[str, str]) -> Path:
    """`logs/<job>` on the volume (docs/contracts.md section 6)."""
    return Path(identity["DDPJOB_SHARED"]) / "logs" / identity["DDPJOB_NAME"]
