"""Addresses without what is secret in them: for logs, and for messages that reach the status of the job."""

from __future__ import annotations

import re

_SECRETS = re.compile(r"(?P<scheme>\b\w+://)(?P<user>[^/\s@]*@)?(?P<place>[^\s?'\"]*)(?P<query>\?[^\s'\"]*)?")
"""From the beginning of a word: what is searched may be a line of any length."""


def public(source: str) -> str:
    """`source` without what is secret in it, whatever characters it has: user name, password, signature."""
    scheme, _, rest = source.partition("://")
    place, query, _ = rest.partition("?")
    host, slash, path = place.partition("/")
    _, at, host = host.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}{slash}{path}" + ("?***" if query else "")


def shown(text: str) -> str:
    """`text` without what is secret in the addresses that it holds: user names, passwords, signatures."""

    def clean(match: re.Match[str]) -> str:
        return match["scheme"] + ("***@" if match["user"] else "") + match["place"] + ("?***" if match["query"] else "")

    return _SECRETS.sub(clean, text)
