"""How submitted code gets into pods: packed in ConfigMaps, which each pod mounts (docs/contracts.md section 2)."""

from __future__ import annotations

from ddpjob_operator.api.pod import Code
from ddpjob_operator.core.values.job import Manifest

VOLUME = "ddpjob-code"
DIRECTORY = "/etc/ddpjob/code"
"""Where pods mount the parts: 00.tar.gz, 01.tar.gz and so on."""

KEY = "files.tar.gz"
"""Of each ConfigMap."""


def part_name(number: int) -> str:
    """File name of a part in its directory, from 0."""
    return f"{number:02}.tar.gz"


def code_volume(code: Code) -> Manifest:
    """All parts in one directory."""
    parts = [
        {"configMap": {"name": name, "items": [{"key": KEY, "path": part_name(number)}]}}
        for number, name in enumerate(code.config_maps)
    ]
    return {"name": VOLUME, "projected": {"sources": parts}}


def code_mount() -> Manifest:
    return {"name": VOLUME, "mountPath": DIRECTORY, "readOnly": True}


def code_variables(code: Code) -> dict[str, str]:
    """Variables of the launcher that finds, verifies and unpacks the parts."""
    named = {"DDPJOB_CODE_DIR": DIRECTORY, "DDPJOB_CODE_SHA256": code.sha256}
    return named if code.requirements is None else named | {"DDPJOB_CODE_REQUIREMENTS": code.requirements}
