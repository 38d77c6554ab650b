"""What `ddpjob drain-node` refuses before it asks a cluster."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app


@pytest.mark.parametrize("duration", ["soon", "0m"])
def test_a_time_in_which_no_pod_can_end_is_refused(duration: str) -> None:
    refused = CliRunner().invoke(app, ("drain-node", "worker-1", "--timeout", duration))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --timeout: ")
    assert duration in refused.stderr
