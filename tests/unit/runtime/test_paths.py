"""Paths of the API."""

from __future__ import annotations

import pytest

from ddpjob_operator.runtime.paths import namespace_of


@pytest.mark.parametrize(
    ("path", "namespace"),
    [
        ("/api/v1/namespaces/team-a/pods/digits-0-0", "team-a"),
        ("/apis/training.ddpjob.io/v1alpha1/namespaces/team-a/ddpjobs", "team-a"),
        ("/apis/training.ddpjob.io/v1alpha1/ddpjobs", ""),
    ],
)
def test_a_call_is_its_namespaces(path: str, namespace: str) -> None:
    assert namespace_of(path) == namespace
