"""Refusals of the API server as a person reads them."""

from __future__ import annotations

import pytest

from ddpjob_operator.follow.refusals import in_words
from ddpjob_operator.runtime.errors import ApiError


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ApiError(0, "ConnectionFailed", "GET /apis: refused"), "or name another one with --context"),
        (
            ApiError(
                0,
                "ConnectionFailed",
                "GET /apis: Cannot connect to host 10.0.0.1:6443 ssl:True [SSLCertVerificationError: (1, '[SSL: "
                "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)')]",
            ),
            "get the kubeconfig anew, or see whether a proxy stands between",
        ),
        (ApiError(401, "Unauthorized", "Unauthorized"), "log in to the cluster again"),
        (ApiError(403, "Forbidden", 'User "ann" cannot list resource "ddpjobs"'), "ask for the role view or edit"),
        (
            ApiError(404, "NotFound", 'namespaces "x" not found', {"kind": "namespaces"}),
            "create it, or name another one",
        ),
        (ApiError(404, "Not Found", "404 page not found"), "install the operator"),
        (ApiError(404, "NotFound", "the server could not find the requested resource"), "install the operator"),
    ],
)
def test_a_refusal_names_what_to_do(error: ApiError, fix: str) -> None:
    assert fix in in_words(error)


@pytest.mark.parametrize(
    "error",
    [
        ApiError(422, "Invalid", "spec.nodes: 0 is too small"),
        ApiError(403, "Forbidden", 'admission webhook "gate" denied the request: images of hub cannot be used'),
        ApiError(401, "Unauthorized", 'admission webhook "gate" denied the request: who are you?'),
    ],
)
def test_words_that_name_it_already_stay_as_they_are(error: ApiError) -> None:
    assert in_words(error) == error.message
