"""Pods of three whose ranks recover live: their environment, and what their ranks put on record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.trainer.launch.conftest import ROOT

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(ROOT / "trainer_image"), str(HERE)])
"""Tasks and scripts are modules of this folder."""


def live_environment(node_rank: int, shared: Path) -> dict[str, str]:
    return {
        "DDPJOB_UID": "0b0c",
        "DDPJOB_SHARED": str(shared),
        "DDPJOB_NODES": "3",
        "DDPJOB_NODE_RANK": str(node_rank),
        "DDPJOB_LIVE": "true",
        "DDPJOB_SNAPSHOT_EVERY": "1000steps",
        "DDPJOB_STALL_MIN_SECONDS": "300",  # steps wait for a new rank
        "PYTHONPATH": PATH,
    }


def events(shared: Path, kind: str) -> list[dict[str, Any]]:
    path = shared / "logs" / "digits" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == kind]
