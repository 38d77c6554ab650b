"""`ddpjob version`: of the command, and of the operators that a cluster has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ddpjob_operator.cli import version
from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.follow.versions import OperatorVersion, version_of
from ddpjob_operator.settings import VERSION


def deployment(image: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "ddpjob-operator", "namespace": "ddpjob", "labels": labels},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (deployment("reg:5000/ddpjob-operator:0.2.0", **{"app.kubernetes.io/version": "0.1.0"}), "0.1.0"),
        (deployment("reg:5000/ddpjob-operator:0.2.0"), "0.2.0"),
        (deployment("reg:5000/ddpjob-operator:0.2.0@sha256:00"), "0.2.0"),
        (deployment("reg:5000/ddpjob-operator@sha256:00"), "unknown"),
    ],
)
def test_a_deployment_says_its_version_by_its_label_or_the_tag_of_its_image(
    found: dict[str, Any], expected: str
) -> None:
    assert version_of(found).version == expected


def printed(*options: str) -> str:
    done = CliRunner().invoke(app, ["version", *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_without_a_cluster_the_version_of_the_command_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    first, second = printed().splitlines()
    assert first == f"Client Version: {VERSION}"
    assert second.startswith("Operator Version: unknown: ")
    assert printed("--client") == f"Client Version: {VERSION}\n"
    assert json.loads(printed("-o", "json")).keys() == {"clientVersion", "operators", "problem"}


def test_each_operator_of_the_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def operators(cluster: Cluster) -> tuple[list[OperatorVersion], str]:
        assert cluster.context == "far"
        return [OperatorVersion("0.2.0", "ddpjob", "ddpjob-operator", "op:0.2.0")], ""

    monkeypatch.setattr(version, "_operators", operators)
    assert printed("--context", "far").splitlines()[1] == "Operator Version: 0.2.0 (ddpjob/ddpjob-operator)"
    found = yaml.safe_load(printed("--context", "far", "-o", "yaml"))
    assert (found["clientVersion"], found["operators"][0]["version"]) == (VERSION, "0.2.0")
