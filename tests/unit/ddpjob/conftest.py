"""The job that several files read."""

from __future__ import annotations

import pytest
from tests.unit.answers import Server
from tests.unit.ddpjob.ended_job import Api

from ddpjob_operator.runtime.client import Client


@pytest.fixture
def api(server: Server, client: Client) -> Api:
    """The client logs in by the kubeconfig of its fixture."""
    return Api(server)
