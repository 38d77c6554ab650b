"""What a machine may lack, by tier, and whether its tests then skip or fail.

`DDPJOB_REQUIRE=api,browser` names the tiers that must run: there, what is missing is a failure. The tests of other
tiers skip, and say what is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import pytest

TIERS: Mapping[str, str] = MappingProxyType(
    {
        "api": "etcd and kube-apiserver",
        "cluster": "nodes that run pods",
        "images": "what builds container images",
        "browser": "Chromium and axe-core",
        "prometheus": "prometheus and promtool",
        "shells": "zsh, fish and shellcheck",
    }
)
"""Names and what their tests need."""


def required_tiers() -> frozenset[str]:
    """What DDPJOB_REQUIRE names.

    Raises pytest.UsageError for a tier that does not exist.
    """
    named = frozenset(os.environ.get("DDPJOB_REQUIRE", "").replace(",", " ").split())
    if unknown := sorted(named - TIERS.keys()):
        raise pytest.UsageError(f"DDPJOB_REQUIRE names {', '.join(unknown)}; the tiers are {', '.join(sorted(TIERS))}")
    return named


def cannot_run(tier: str, missing: str) -> NoReturn:
    """Skip a test of this tier; fail it if DDPJOB_REQUIRE names the tier."""
    assert tier in TIERS, tier
    if tier in required_tiers():
        pytest.fail(f"DDPJOB_REQUIRE names the {tier} tier, which cannot run here: {missing}", pytrace=False)
    pytest.skip(missing)


def program(tier: str, *names: str) -> str:
    """The path of the first of these programs that is installed. Without any, the test cannot run."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        cannot_run(tier, f"{' or '.join(names)} is not installed; on Debian, `make tools` installs it")
    return found
