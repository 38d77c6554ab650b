"""What pip says, and what ended it: in words for the person who submitted the requirements."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from http import HTTPStatus
from itertools import takewhile
from typing import Final

from ddp_trainer.contract.addresses import shown

_SHOWN_ERRORS: Final = 3
_CONFLICT: Final = "The conflict is caused by:"
_HASHES: Final = {
    "DO NOT MATCH THE HASHES": (
        "a package is not the one that was locked",
        "lock the file again, if you trust this one,",
    ),
    "--require-hashes mode": (
        "where one package has a hash, all need one",
        "lock the file again, with all that its packages require,",
    ),
    "Can't verify hashes": (
        "folders and repositories have no hash, and here all packages need one",
        "name a wheel of it with its hash",
    ),
}
"""What pip says of a file with hashes: what that means, and what to do."""
_NO_VERSION: Final = "(from versions: none)"
_BROKEN: Final = re.compile(r"after connection broken by '(.*)': /")
"""pip's warning of a connection that it tries again, with the words of the exception."""
_OBJECT: Final = re.compile(r"<[^>]*>[:,] ")
_UNTRUSTED: Final = re.compile(r"WARNING: The repository located at (\S+) is not a trusted or secure host")
_QUERY: Final = re.compile(r"(: /[^\s?]*)\?\S+")
"""Of the path that ends pip's warning of a connection that it tries again."""


_ANSWER: Final = re.compile(
    r"too many (\d{3}) error responses|: (\d{3}) (?:Client|Server) Error: |HTTP error (\d{3}) while getting"
)
"""The status in pip's words for an answer of the index."""
_NOT_FETCHED: Final = "Could not fetch URL "


class NotInstalled(Exception):
    """Something else than the requirements is to blame, so the next attempt may install them. `reason` is that of the
    failure of the pod.
    """

    reason: str


class IndexFails(NotInstalled):
    """The package index answers that it cannot serve now."""

    reason = "WorkerException"  # by the words of the message, it is a NetworkError to the operator

    def __init__(self, path: str, status: int) -> None:
        answer = f"{status} {'Client' if status < 500 else 'Server'} Error"
        super().__init__(
            f"{path} was not installed, since the package index answers with {answer}; if it goes on, name another one "
            "in PIP_INDEX_URL (submit -e)"
        )


class PipKilled(NotInstalled):
    """A signal ended pip, or the kernel a process of it for memory."""

    def __init__(self, path: str, by: signal.Signals | None, *, for_memory: bool) -> None:
        self.reason = "OutOfMemory" if for_memory else "WorkerKilled"
        end = "a process of pip was killed" if by is None else f"{by.name} ended pip"
        cause = ": the pod has reached its memory limit, or its node has no memory left" if for_memory else ""
        super().__init__(f"{path} was not installed, since {end}{cause}")


def without_secrets(line: str) -> str:
    """A line as it may be shown. pip hides the password of an address, not its query, which may be a signature, and
    nothing in a line that it does not understand.
    """
    return _QUERY.sub(r"\1?***", shown(line))


def pip_errors(lines: Sequence[str]) -> str:
    """What pip says of why it failed, in one line."""
    conflict = lines[lines.index(_CONFLICT) + 1 :] if _CONFLICT in lines else []
    causes = [line.strip() for line in takewhile(lambda line: line.startswith(" "), conflict)]
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("WARNING:", "[notice]"))]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")]
    return " | ".join((causes or errors or said)[-_SHOWN_ERRORS:]) or "pip printed nothing"


def hash_errors(lines: Sequence[str]) -> tuple[str, str] | None:
    """Which hashes of a locked file are wrong or missing, by package, and what to do; None if pip failed otherwise."""
    found = ((at, words) for at, line in enumerate(lines, 1) for head, words in _HASHES.items() if head in line)
    if (first := next(found, None)) is None:
        return None
    at, (meaning, fix) = first
    details = (" ".join(line.split()) for line in takewhile(lambda line: line.startswith(" "), lines[at:]))
    # of what pip expected there may be dozens, one a build
    packages = " | ".join([line for line in details if not line.startswith("Expected ")][:_SHOWN_ERRORS])
    return f"{meaning}: {packages.replace(': | Got ', ': got ')}", fix


def unreachable(lines: Sequence[str]) -> str:
    """Why pip did not reach the index, if that left it without a single version of a package; else empty."""
    if not any(_NO_VERSION in line for line in lines):
        return ""
    causes = [found[1] for line in lines if (found := _BROKEN.search(line))]
    return _OBJECT.sub("", causes[-1]) if causes else ""


def untrusted(lines: Sequence[str]) -> str:
    """The host that pip did not ask because it has no HTTPS, if that left a package without a version; else empty."""
    if not any(_NO_VERSION in line for line in lines):
        return ""
    return next((found[1] for line in lines if (found := _UNTRUSTED.match(line))), "")


def answer_of_index(lines: Sequence[str], log: Sequence[str]) -> int | None:
    """The HTTP status that left pip without a package; None if it was no such answer. pip keeps it from its output
    where the list of versions is concerned: its `log` has it.
    """
    listed = any(_NO_VERSION in line for line in lines)
    said = [line for line in log if _NOT_FETCHED in line] if listed else lines
    found = [int(next(filter(None, match.groups()))) for line in said if (match := _ANSWER.search(line))]
    return max(found, default=None)  # a package that one index lacks (404) may be in another one, which fails


def refusal(lines: Sequence[str], answer: int | None) -> str:
    """What stopped pip, by its output and the answer of the index, and what to do."""
    if answer in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return (
            f"the package index answers with {answer} {HTTPStatus(answer).phrase}; name one that this pod may use in "
            "PIP_INDEX_URL (submit -e), with a user name and a password if it needs them, and submit the code again"
        )
    if cause := unreachable(lines):
        return (
            f"this pod does not reach the package index ({cause}); name one that it reaches in PIP_INDEX_URL (submit "
            "-e), put wheels on the volume and the lines --no-index and --find-links /mnt/shared/wheels into the file, "
            "or use an image that has the packages"
        )
    if host := untrusted(lines):
        return (
            f"pip does not ask {host}, which has no HTTPS; serve it with HTTPS, or add PIP_TRUSTED_HOST={host} (submit "
            "-e) if you trust it"
        )
    cause, fix = hash_errors(lines) or (pip_errors(lines), "correct it")
    return f"{cause}; {fix} and submit the code again. The log of node rank 0 has the output of pip"


def signal_of(code: int) -> signal.Signals | None:
    """What ended pip. With --python it starts itself again, and exits with the negative code of that: of 8 bits."""
    number = -code if code < 0 else 256 - code
    return next((known for known in signal.Signals if known == number), None)
