"""A module may be looked up again and again before it is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from ddp_trainer.rank.after_import import after_import

NAME = "imported_later"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    importlib.invalidate_caches()


def test_a_module_that_is_only_looked_up_is_still_waited_for() -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    after_import(NAME, lambda: seen.append(sys.modules[NAME].value))
    assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    importlib.import_module(NAME)
    assert seen == [1]
    assert sys.meta_path == finders


def test_two_may_wait_for_a_module_and_one_may_give_up() -> None:
    seen: list[str] = []
    after_import(NAME, lambda: seen.append("first"))
    give_up = after_import(NAME, lambda: seen.append("second"))
    after_import(NAME, lambda: seen.append("third"))
    give_up()
    importlib.import_module(NAME)
    assert sorted(seen) == ["first", "third"]
