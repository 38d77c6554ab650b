"""Which shard a namespace belongs to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.shards import Shard, shard_of

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)


@given(NAMES, st.integers(1, 32))
def test_each_namespace_is_in_one_shard(namespace: str, count: int) -> None:
    assert [Shard(number, count).has(namespace) for number in range(count)].count(True) == 1


def test_a_namespace_is_in_the_same_shard_in_each_version() -> None:
    """An operator and its successor would otherwise both act on it, or neither."""
    assert [shard_of(name, 4) for name in ("default", "team-a", "team-b", "ml")] == [1, 0, 2, 0]


def test_shards_are_about_equal() -> None:
    sizes = Counter(shard_of(f"team-{number}", 4) for number in range(4000))
    assert sorted(sizes) == [0, 1, 2, 3]
    assert 900 < min(sizes.values()) <= max(sizes.values()) < 1100


@pytest.mark.parametrize(("number", "watched"), [(0, {"a", "b", "c", "e"}), (1, {"d"})])
def test_a_shard_watches_its_own_of_the_listed_namespaces(number: int, watched: set[str]) -> None:
    assert set(Shard(number, 2).served(("a", "b", "c", "d", "e"))) == watched


def test_a_shard_without_any_listed_namespace_does_not_watch_them_all() -> None:
    """No list is every namespace of the cluster."""
    other = Shard(1 - shard_of("only", 2), 2)
    assert other.served(("only",)) == ("only",)
    assert not other.has("only")
