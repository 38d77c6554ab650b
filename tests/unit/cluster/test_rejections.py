"""What the author of a job reads of what the API server refuses."""

from __future__ import annotations

import pytest

from ddpjob_operator.cluster.rejections import forbids, problem_of, refuses, taken
from ddpjob_operator.runtime.errors import ApiError

WEBHOOK = 'admission webhook "policy.example.com" denied the request: '
POLICY = "pods \"digits-0-1\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: "
POD = {"kind": "Pod", "metadata": {"name": "digits-0-1"}}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"deletionTimestamp": "2030-01-01T12:00:00Z"}, "is still being deleted; this job goes on when it is gone"),
        ({}, "does not belong to this job; delete it, or give the job another name"),
    ],
)
def test_a_name_that_is_about_to_be_free_asks_for_nothing(metadata: dict[str, str], words: str) -> None:
    message = taken("Pod", {"metadata": {"name": "train-0-0", **metadata}}).message
    assert message.startswith("Pod train-0-0 ")
    assert words in message


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, f"{WEBHOOK}no team", "AdmissionDenied"),
        (409, f"{WEBHOOK}no team", "AdmissionDenied"),
        (401, f"{WEBHOOK}who are you?", "AdmissionDenied"),
        (500, f"{WEBHOOK}the inventory\ndoes not answer", "AdmissionFailed"),
        (503, f"{WEBHOOK}the inventory does not answer", "AdmissionFailed"),
        (429, f"{WEBHOOK}the inventory is busy", "AdmissionFailed"),
        (500, 'Internal error occurred: failed calling webhook "a": no endpoints', "AdmissionFailed"),
        (
            500,
            "pod tolerations (possibly merged with namespace default tolerations) conflict with its namespace "
            "whitelist",
            "AdmissionDenied",
        ),
        (
            500,
            "Internal error occurred: add operation does not apply: doc is missing path: "
            '"/metadata/annotations/injected": missing value',
            "AdmissionFailed",
        ),
        (422, f"{POLICY}no team", "AdmissionDenied"),
        (403, f"{POLICY}no team", "AdmissionDenied"),
        (413, f"{POLICY}too large", "AdmissionDenied"),
        (403, "policy 'p' with binding 'b' denied request: JSON Patch: doc is missing path", "AdmissionDenied"),
        (403, 'policy "p" denied request: failed to configure policy: no such kind', "AdmissionDenied"),
        (413, "Request entity too large: limit is 3145728", "TooLarge"),
        (500, "etcdserver: request is too large", "TooLarge"),
        (
            500,
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2 vs. 1)",
            "TooLarge",
        ),
    ],
)
def test_what_no_retry_would_change_is_a_refusal_whatever_its_status(status: int, message: str, reason: str) -> None:
    error = ApiError(status, "AsItsAuthorChose", message)
    assert refuses(error)
    assert forbids(error)
    found = problem_of(POD, error)
    assert (found.reason, found.message) == (reason, f"the API server rejected Pod digits-0-1: {message}")


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_what_the_api_server_fails_at_by_itself_is_no_refusal(status: int) -> None:
    error = ApiError(status, "InternalError", "etcdserver: request timed out")
    assert not refuses(error)
    assert not forbids(error)
