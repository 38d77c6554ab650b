"""The audit log of the API server: who asked for what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that the API server wrote into its audit log."""

    verb: str
    resource: str
    name: str
    code: int

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name} -> {self.code}"


@dataclass(frozen=True, slots=True)
class AuditLog:
    """What was written into the log since a test began. It is rotated at 100 MB."""

    path: Path
    inode: int
    size: int
    """Both when the test began."""

    @classmethod
    def beside(cls, kubeconfig: Path) -> AuditLog | None:
        """That of the API server which has its kubeconfig in the same folder."""
        path = kubeconfig.parent / "audit.log"
        if not path.exists():
            return None
        found = path.stat()
        return cls(path, found.st_ino, found.st_size)

    def asked(self, namespace: str, agent: str, marker: str) -> list[Asked] | None:
        """What an agent has asked about a namespace; None as long as the log lacks the marker, or one is not
        answered.
        """
        text = self._text()
        if marker.encode() not in text:
            return None
        events = [event for line in text.splitlines() if (event := _event(line, namespace, agent))]
        ended = {event["auditID"] for event in events if event["stage"] != "RequestReceived"}
        asking = [event for event in events if event["auditID"] not in ended and event["verb"] != "watch"]
        return None if asking else [_entry(event) for event in events if event["stage"] == "ResponseComplete"]

    def _text(self) -> bytes:
        """Through at most one rotation."""
        parts = [*sorted(self.path.parent.glob(f"{self.path.stem}-*{self.path.suffix}")), self.path]
        while len(parts) > 1 and parts[0].stat().st_ino != self.inode:
            parts.pop(0)
        text = b"".join(part.read_bytes() for part in parts[1:])
        with parts[0].open("rb") as first:
            first.seek(self.size if parts[0].stat().st_ino == self.inode else 0)
            return first.read() + text


def _event(line: bytes, namespace: str, agent: str) -> Object | None:
    """A line of the log, if it is about what this agent asked of this namespace."""
    try:
        event: Object = json.loads(line)
    except ValueError:  # the line that is being written
        return None
    about = event.get("objectRef") or {}
    is_theirs = event.get("userAgent", "").startswith(agent)
    return event if is_theirs and about.get("namespace") == namespace else None


def _entry(event: Object) -> Asked:
    about = event["objectRef"]
    resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
    return Asked(event["verb"], resource, about.get("name", ""), event.get("responseStatus", {}).get("code", 0))
