"""The release of pods after `helm uninstall`, where something is refused."""

from __future__ import annotations

import pytest
from tests.unit.answers import Server, ok, status

from ddpjob_operator.cluster.release import release_everywhere
from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError


async def test_a_namespace_that_cannot_be_listed_keeps_no_other_one_from_being_released(
    server: Server, client: Client
) -> None:
    metadata = {"name": "digits-0-0", "namespace": "second", "uid": "pod-1", "resourceVersion": "5"}
    listed = {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": metadata | {"finalizers": [FINALIZER]}}]}
    server.answers = [
        status(403, "Forbidden", "the Role is gone"),
        ok(listed),
        ok({"metadata": metadata | {"resourceVersion": "10"}, "status": {"phase": "Running"}}),
    ]
    with pytest.raises(ApiError, match="the Role is gone"):
        await release_everywhere(client, ("first", "second"))
    patched = [request.path for request in server.asked if request.method == "PATCH"]
    assert patched == ["/api/v1/namespaces/second/pods/digits-0-0"]
