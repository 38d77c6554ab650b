"""What `ddpjob debug` refuses before it asks a cluster."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ddpjob_operator.cli.main import app


@pytest.mark.parametrize("duration", ["soon", "0m"])
def test_a_time_for_which_no_shell_can_be_there_is_refused(duration: str) -> None:
    refused = CliRunner().invoke(app, ("debug", "digits", "--for", duration))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --for: ")
    assert duration in refused.stderr
