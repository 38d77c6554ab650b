"""Addresses without what is secret in them: for logs, and for messages that reach the status of the job."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"\b\w+://(?:[^/\s]*@)?[^\s'\"]*")
"""From the beginning of a word: what is searched may be a line of any length."""

_END_OF_HOST = re.compile(r"[/?]")

_HOST = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d*)?")
"""With a port, or without."""


def public(source: str) -> str:
    """`source`, blanks and quotes included, without what is secret in it: user name, password, signature.

    A password may have `/`, `?` or `@` that are not in percent codes. So where a user or a port comes first, all up to
    the last `@` is left out; and all that follows too if a `?` is before it, for then it may be of a signature. A user
    name without a password, such as a token, looks like a host if it has a `/` or `?` itself.
    """
    scheme, host, rest = _parts(source)
    before, at, after = rest.rpartition("@")
    if at and ("@" in host or ":" in host):
        rest = "***" if "?" in before else f"***@{after}"
    return _without_query(scheme, rest)


def shown(text: str) -> str:
    """`text` without what is secret in the addresses that it holds: user names, passwords, signatures.

    It may be a line of pip, with a revision or a version behind an `@` in the path. So an address is read as its
    standard has it, and where that is possible, what follows the first `/` stays: also of a password that is not in
    percent codes, if a host could be before the `/`. `public` is for an address that may have such a password.
    """
    return _ADDRESS.sub(lambda match: _as_written(match[0]), text)


def _as_written(address: str) -> str:
    scheme, host, rest = _parts(address)
    user, at, host = host.rpartition("@")
    if not at and not _HOST.fullmatch(host):
        return public(address)  # what is in the place of a port begins a password
    return _without_query(scheme, f"***@{rest[len(user) + 1 :]}" if at else rest)


def _parts(address: str) -> tuple[str, str, str]:
    """The scheme, the host with what is before and after it, and all behind the scheme."""
    scheme, _, rest = address.partition("://")
    return scheme, _END_OF_HOST.split(rest, maxsplit=1)[0], rest


def _without_query(scheme: str, rest: str) -> str:
    place, query, _ = rest.partition("?")
    return f"{scheme}://{place}" + ("?***" if query else "")
