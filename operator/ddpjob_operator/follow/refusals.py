"""What a person reads where the API server refuses, or does not answer."""

from __future__ import annotations

import re

from ddpjob_operator.runtime.errors import ApiError

_NO_SUCH_KIND = re.compile("could not find the requested resource|page not found", re.IGNORECASE)
"""An API server's answer for a kind of which it has no CRD."""
_OTHER_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's word for a certificate of another authority or name, or one that has expired."""
_WHOSE = (
    "the cluster answers with a certificate that certificate-authority-data, server or tls-server-name of the "
    "kubeconfig do not allow: get the kubeconfig anew, or see whether a proxy stands between"
)


def in_words(error: ApiError) -> str:
    """What the API server answered, and what to do about it where its own words do not say."""
    if error.denied:  # in words of the policy's author, whatever the status and the reason are
        return error.message
    if error.status == 0 and _OTHER_CERTIFICATE in error.message:
        return f"{error.message}; {_WHOSE}"
    if error.status == 0 and error.reason in ("ConnectionFailed", "Timeout"):
        return f"{error.message}; check that the cluster runs, or name another one with --context"
    if error.status == 401:
        return f"{error.message}; log in to the cluster again, or name another one with --context"
    if error.status == 403 and error.reason == "Forbidden" and "cannot" in error.message:
        return f"{error.message}; ask for the role view or edit, or name your own namespace with --namespace"
    if error.status == 404 and _NO_SUCH_KIND.search(error.message):
        return "this cluster has no DDPJobs: install the operator in it, or name another one with --context"
    if error.status == 404 and error.details.get("kind") == "namespaces":
        return f"{error.message}; create it, or name another one with --namespace"
    return error.message
