"""A script in the root of the volume, beside folders that are no packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from ddp_trainer.rank.volume_imports import hide_folders


def test_a_folder_of_the_volume_is_no_package_and_what_a_user_puts_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("datasets", "logs", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "logs" / "__init__.py").touch()
    (tmp_path / "data_of_mine.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert importlib.util.find_spec("datasets") is not None, "as plain Python sees it"
    hide_folders(tmp_path)
    importlib.invalidate_caches()
    names = ("datasets", "logs", "mine", "data_of_mine")
    assert [importlib.util.find_spec(name) is not None for name in names] == [False, True, True, True]
