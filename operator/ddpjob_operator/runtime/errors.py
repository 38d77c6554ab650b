"""What a call to the API server can end with instead of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NO_CONFIGURATION = "NoConfiguration"
"""Reason where no API server was asked: there is no kubeconfig, or it gives no credentials."""

_DENIED = re.compile(
    r"admission webhook .* denied the request|[Pp]olicy \S+( with binding \S+)? denied request", re.DOTALL
)
"""A ValidatingAdmissionPolicy names its kind before its own name, and a MutatingAdmissionPolicy that fails does not."""
_TOO_LARGE = ("request is too large", "message larger than max")
"""What etcd says, or the API server's client of it, which the API server passes on as an internal error (500)."""


class ApiError(Exception):
    """The API server answered with an error (metav1.Status), or not at all (`status` 0)."""

    expected = True
    """Such errors happen in every cluster: a log line says it all, a traceback adds nothing."""

    look_within: float | None = None
    """Seconds within which to look again although the backoff may be longer: something is due then."""

    def __init__(self, status: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def object_is_gone(self) -> bool:
        """There is no such object. A 404 that names none is about its whole kind, which a server that has just started
        (Kubernetes before 1.23) does not serve yet."""
        return self.not_found and bool(self.details.get("name"))

    @property
    def conflict(self) -> bool:
        """The resourceVersion or uid that guarded the call is not the object's current one."""
        return self.status == 409 and self.reason != "AlreadyExists"

    @property
    def already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def lacks_right(self) -> bool:
        """The caller's roles do not allow the call; admission, which refuses with 403 too, has not seen it."""
        return self.status == 403 and " cannot " in self.message and '" in API group "' in self.message

    @property
    def denied(self) -> bool:
        """An admission webhook or policy has said no, with whatever status its author chose."""
        return self.status >= 400 and _DENIED.search(self.message) is not None

    @property
    def may_be_done(self) -> bool:
        """The server may have carried out the call all the same: its answer was lost, or it does not know itself."""
        return self.status == 0 or self.status >= 500

    @property
    def too_large(self) -> bool:
        """The object is larger than the API server takes or etcd stores: it never will be taken as it is."""
        return self.status == 413 or (self.status >= 500 and any(words in self.message for words in _TOO_LARGE))

    @property
    def no_dry_run(self) -> bool:
        """A webhook with side effects sees the object, so the API server makes no dry run of it."""
        return self.status == 400 and "does not support dry run" in self.message

    @property
    def namespace_terminating(self) -> bool:
        """Nothing will ever be created in this namespace again: it is being deleted, or is gone. A 404 about anything
        else is a kind that may be installed later."""
        if self.not_found:
            return self.details.get("kind") == "namespaces"
        causes = self.details.get("causes") or []
        return self.status == 403 and (
            any(cause.get("reason") == "NamespaceTerminating" for cause in causes)
            or "because it is being terminated" in self.message
        )


def without_frames(error: BaseException) -> None:
    """Let go of what an error, and those that led to it, came through. An error that is kept keeps all values of these
    functions, and is in a cycle with them where one of the values is the error."""
    left: list[BaseException | None] = [error]
    seen = set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += (one.__cause__, one.__context__)
