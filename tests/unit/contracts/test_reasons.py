"""docs/conditions.md lists every phase, condition, reason and event that the code can write."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob_operator.api import reasons
from ddpjob_operator.api.status import Phase
from ddpjob_operator.core.failure.detect import _DISRUPTED
from ddpjob_operator.core.values import conditions

ROOT = Path(__file__).parents[3]
WRITERS = (
    "operator/ddpjob_operator/core",
    "operator/ddpjob_operator/cluster",
    "operator/ddpjob_operator/wire",
    "trainer_image/ddp_trainer/contract/outcomes.py",
    "trainer_image/ddp_trainer/launch/exit",
    "trainer_image/ddp_trainer/initialize/__main__.py",
)
"""Where conditions, failures, events and termination messages are made."""

KUBERNETES = frozenset([
    "Always", "AppArmor", "Background", "Capabilities", "ClusterFirstWithHostNet", "ClusterIP", "ContainerCreating",
    "ContainerStatusUnknown", "ContainersReady", "Coscheduling", "DNSConfigForming", "Default", "DeleteOptions",
    "DisruptionTarget", "Egress", "Exists", "FailedScheduling", "FailedToRetrieveImagePullSecret",
    "False", "File", "HostProcess", "ImagePullBackOff", "In", "Ingress", "Kueue", "Localhost", "Memory",
    "NetworkPolicy", "Never", "NoExecute", "NoSchedule", "Normal", "NotIn", "OnRootMismatch", "PersistentVolumeClaim",
    "Pod", "PodGroup", "PolicyViolation",
    "PodInitializing", "PodScheduled", "Ready", "RegistryUnavailable", "RuntimeDefault", "SELinux", "ScheduleAnyway",
    "Seccomp", "Service", "SignatureValidationFailed", "Sysctls", "TaintToleration", "TerminatedByKueue",
    "TerminationTarget", "True", "Volcano", "Warning",
])  # fmt: skip
"""Kinds, fields and values of Kubernetes, and of Kyverno, that are no reasons of ours."""

OTHER = frozenset([
    "All", "Any", "Claim", "DistNetworkError", "Ei", "ExcludeNode", "Fail", "FirstNode", "Gang", "Gi", "Job", "Ki",
    "Live", "Mi", "Missing", "None", "OutOfMemoryError", "Pi", "ProcessRaisedException", "Rendezvous", "Restart",
    "RestartAndIgnoreMaxRestarts", "Ti", "Warn",
])  # fmt: skip
"""Units, values of the spec, and names in exceptions."""


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/conditions.py"))


def literals() -> dict[str, set[str]]:
    """Every literal in CamelCase, and the files it is in."""
    found: dict[str, set[str]] = {}
    for writer in WRITERS:
        path = ROOT / writer
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for name in _camel_case(ast.parse(file.read_text())):
                found.setdefault(name, set()).add(file.name)
    return found


def _camel_case(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\A[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*\Z", node.value)


def documented() -> frozenset[str]:
    """Every phase, condition type and reason of the tables."""
    rows = (*reasons.STATES, *reasons.STARTUP, *reasons.FAILURES, *reasons.EVENTS)
    return frozenset({*(phase.value for phase in reasons.PHASES), *reasons.CONDITIONS, *(row.name for row in rows)})


def test_the_page_is_up_to_date(generator: dict[str, Any]) -> None:
    assert generator["PAGE"].read_text() == generator["rendered"]()


def test_every_reason_in_the_code_has_a_row() -> None:
    known = documented() | KUBERNETES | OTHER | _DISRUPTED.keys()
    missing = {name: files for name, files in literals().items() if name not in known}
    assert missing == {}, "add a row to api/reasons.py and run `make generate`"


def test_every_row_is_a_reason_in_the_code() -> None:
    assert documented() - literals().keys() - {phase.value for phase in Phase} == frozenset()


def test_the_lists_of_other_names_hold_nothing_that_is_gone() -> None:
    assert (KUBERNETES | OTHER) - literals().keys() == frozenset()


def test_every_phase_and_every_condition_has_a_row() -> None:
    assert set(reasons.PHASES) == set(Phase)
    types = {value for name, value in vars(conditions).items() if name.isupper() and isinstance(value, str)}
    assert reasons.CONDITIONS.keys() == types


def test_what_needs_a_person_says_what_to_do(generator: dict[str, Any]) -> None:
    attention = [row for row in reasons.STATES if "Degraded=True" in row.of or "Failed=True" in row.of]
    rows = [*attention, *reasons.STARTUP, *reasons.FAILURES]
    silent = [row.name for row in rows if not generator["action_for"](row)]
    assert set(silent) == {"NamespaceTerminating", "Unknown"}


def test_no_reason_is_listed_twice_in_a_table() -> None:
    for table in (reasons.STATES, reasons.STARTUP, reasons.FAILURES, reasons.EVENTS):
        names = [row.name for row in table]
        assert len(names) == len(set(names))
