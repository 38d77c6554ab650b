"""Addresses without what is secret in them: for logs, and for messages that reach the status of the job."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"\b\w+://(?:[^/\s]*@)?[^\s'\"]*")
"""From the beginning of a word: what is searched may be a line of any length."""

_END_OF_HOST = re.compile(r"[/?]")


def public(source: str) -> str:
    """`source` without what is secret in it, whatever characters it has: user name, password, signature.

    A password may have `/`, `?` or `@` that are not in percent codes. So where a user or a port comes first, all up to
    the last `@` is left out; and all that follows too if a `?` is before it, for then it may be of a signature.
    """
    scheme, _, rest = source.partition("://")
    host = _END_OF_HOST.split(rest, maxsplit=1)[0]
    before, at, after = rest.rpartition("@")
    if at and ("@" in host or ":" in host):
        rest = "***" if "?" in before else f"***@{after}"
    place, query, _ = rest.partition("?")
    return f"{scheme}://{place}" + ("?***" if query else "")


def shown(text: str) -> str:
    """`text` without what is secret in the addresses that it holds: user names, passwords, signatures."""
    return _ADDRESS.sub(lambda match: public(match[0]), text)
