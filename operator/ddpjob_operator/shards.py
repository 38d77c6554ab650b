"""Which of several operators acts on a namespace: a hash of its name decides, so that they need not agree on anything.

A job never leaves its shard while their number stays the same. docs/decisions/0014-shards.md has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards, numbered from 0."""

    number: int = 0
    count: int = 1

    def has(self, namespace: str) -> bool:
        """Whether jobs of this namespace are this shard's."""
        return self.count == 1 or shard_of(namespace, self.count) == self.number

    def served(self, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `namespaces` that are worth a watch: this shard's. All of them if it has none, because no list
        means every namespace."""
        return tuple(filter(self.has, namespaces)) or namespaces


def shard_of(namespace: str, count: int) -> int:
    """The number of the shard of a namespace, of `count` shards. It must not change from version to version."""
    return int.from_bytes(sha256(namespace.encode()).digest()[:8]) % count


def shard_lease(lease: str, number: int) -> str:
    """Name of the Lease of one shard, where that of the whole operator is `lease`."""
    return f"{lease}-shard-{number}"


def layout(count: int) -> str:
    """Who holds the Lease of the whole operator where there are `count` shards: all of them together."""
    return f"{count} shards"
