"""What `ddpjob debug` refuses, and what it gives to copy."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from ddpjob_operator.cli.debug import _failed
from ddpjob_operator.cli.main import app
from ddpjob_operator.cli.on_cluster import Cluster
from ddpjob_operator.cli.parameters import GlobalOptions
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.wire.jobs import parse_job


@pytest.mark.parametrize("duration", ["soon", "0m"])
def test_a_time_for_which_no_shell_can_be_there_is_refused(duration: str) -> None:
    refused = CliRunner().invoke(app, ("debug", "digits", "--for", duration))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --for: ")
    assert duration in refused.stderr


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        (
            [{"metadata": {"name": "digits-0-0"}, "status": {"phase": "Running"}}],
            "kubectl --kubeconfig prod.yaml --context prod exec -it -n ml digits-0-0 -c trainer -- sh opens a shell",
        ),
        ([], "ddpjob --kubeconfig prod.yaml why digits -n ml --context prod says where it is"),
    ],
)
def test_what_is_given_to_copy_asks_the_same_cluster(
    pods: list[dict[str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlobalOptions, "kubeconfig", "prod.yaml")
    job = parse_job({"metadata": {"name": "digits", "namespace": "ml", "uid": "u-1"}, "spec": {}})
    with pytest.raises(ApiError) as refusal:
        _failed(job, pods, Cluster(context="prod"), "default")
    assert said in refusal.value.message
