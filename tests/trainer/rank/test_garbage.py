"""The collector of garbage rests while torch is imported, and only then."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.contract.one_rank import run_rank

from ddp_trainer.rank import garbage

NAMES = ("stands_in_for_torch", "stands_in_for_its_compiler")
MANY = "kept = [[] for _ in range(50_000)]\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.unfreeze()  # conftest.py freezes the tests
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(MANY)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(garbage, "TORCH", NAMES[0])
    monkeypatch.setattr(garbage, "COMPILER", NAMES[1])
    yield
    for name in NAMES:
        sys.modules.pop(name, None)
    gc.enable()
    gc.freeze()


SCRIPT = """
import gc
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
import torch
import torch._dynamo
print(collected.count(2), len(gc.get_objects(generation=2)) > 200_000, gc.isenabled(), gc.get_freeze_count())
"""


@pytest.mark.processes
def test_torch_and_its_compiler_are_imported_without_a_full_collection(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT, tmp_path)
    assert ended.stdout == "0 True True 0\n", ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_collection_while_the_module_is_imported(name: str) -> None:
    garbage.import_torch_without_collections()
    collected: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start" and name in sys.modules and not hasattr(sys.modules[name], "kept"):
            collected.append(name)

    gc.callbacks.append(note)
    try:
        importlib.import_module(name)
    finally:
        gc.callbacks.remove(note)
    assert collected == []
    assert gc.isenabled()


class Model:
    def __init__(self) -> None:
        self.forward = self.__call__  # as accelerate replaces it

    def __call__(self) -> None: ...


def test_a_model_that_the_script_has_by_then_is_still_freed() -> None:
    garbage.import_torch_without_collections()
    importlib.import_module(NAMES[0])
    model = Model()
    freed = weakref.ref(model)
    importlib.import_module(NAMES[1])
    del model
    gc.collect()
    assert freed() is None


def test_what_a_script_has_frozen_stays_so() -> None:
    garbage.import_torch_without_collections()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        importlib.import_module(NAMES[0])
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_a_script_without_collections_stays_so() -> None:
    garbage.import_torch_without_collections()
    gc.disable()
    importlib.import_module(NAMES[0])
    assert not gc.isenabled()


def test_collections_go_on_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / f"{NAMES[0]}.py").write_text("raise ImportError('libcudart.so is missing')")
    garbage.import_torch_without_collections()
    with pytest.raises(ImportError, match="libcudart"):
        importlib.import_module(NAMES[0])
    assert gc.isenabled()
