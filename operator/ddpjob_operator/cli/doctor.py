"""`ddpjob doctor`: what in a cluster would stop a job of the caller, one line a check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import yaml

from ddpjob_operator.cli.on_cluster import Cluster, asked
from ddpjob_operator.cli.parameters import FAILED, SUCCEEDED, Output
from ddpjob_operator.cli.terminal import Style, styled, width
from ddpjob_operator.follow.doctor.checkup import examine
from ddpjob_operator.follow.doctor.findings import Finding, Level, summary
from ddpjob_operator.follow.doctor.read import read_facts
from ddpjob_operator.runtime.client import Client

_STYLES = {Level.PROBLEM: Style.BOLD, Level.WARNING: Style.YELLOW, Level.UNKNOWN: Style.DIM}


def show_doctor(cluster: Cluster, output: Output) -> int:
    """Print the findings; 1 if one of them is a problem."""

    async def ask(client: Client, namespace: str) -> int:
        findings = examine(await read_facts(client, namespace))
        if output is Output.TEXT:
            _print_lines(findings, namespace)
        else:
            found = {"namespace": namespace, "findings": [asdict(finding) for finding in findings]}
            text = json.dumps(found, indent=2)
            print(text if output is Output.JSON else yaml.safe_dump(json.loads(text), sort_keys=False).rstrip())
        return FAILED if any(finding.level is Level.PROBLEM for finding in findings) else SUCCEEDED

    return asked(cluster, ask)


def _print_lines(findings: Sequence[Finding], namespace: str) -> None:
    for finding in findings:
        for line in finding.lines(width()):
            print(styled(line, _STYLES[finding.level]) if finding.level in _STYLES else line)
    print(f"{summary(findings)} for jobs in namespace {namespace}")
