"""The shape of core that keeps it readable, held by its syntax: one owner of transitions, one check of the bounds, few
parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ddpjob_operator.core
from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.values.changes import Owned, Recorded

CORE = Path(ddpjob_operator.core.__file__).parent
MODULES = {str(path.relative_to(CORE)): ast.parse(path.read_text()) for path in sorted(CORE.rglob("*.py"))}
MOST_PARAMETERS = 4

OWNED = ("phase", "attempt", "conditions", "internal")
"""Fields of the status that only transitions change."""


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that a module uses, imports or takes as an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name.rpartition(".")[2]


def calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called == function:
                yield node


@cache
def used(module: str) -> frozenset[str]:
    return frozenset(names(MODULES[module]))


def places(name: str, *, but: tuple[str, ...]) -> list[str]:
    return [module for module in MODULES if module not in but and name in used(module)]


def too_long(tree: ast.AST) -> Iterator[str]:
    """Functions with more parameters than a reader keeps in mind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            every = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if len([name for name in every if name not in ("self", "cls")]) > MOST_PARAMETERS:
                yield node.name


def test_only_transitions_change_the_phase_the_attempt_the_conditions_and_the_recorded_spec() -> None:
    assert not {field for field in OWNED if field in Recorded.__annotations__}
    assert places("transitioned", but=("transitions.py", "values/changes.py")) == []
    assert places("set_condition", but=("transitions.py", "values/conditions.py")) == []
    assert places("Condition", but=("transitions.py", "values/conditions.py", "values/changes.py")) == [
        "gang/problems.py"  # which reads one
    ]


def test_a_status_is_changed_by_typed_functions_alone() -> None:
    for way in ("model_copy", "model_construct", "__dict__", "setattr", "__setattr__"):
        assert places(way, but=("values/changes.py",)) == [], way
    made = [module for module, tree in MODULES.items() if any(calls(tree, "DDPJobStatus"))]
    assert made == []
    splatted = [
        module
        for module, tree in MODULES.items()
        for function in ("recorded", "transitioned")
        for call in calls(tree, function)
        if any(keyword.arg is None for keyword in call.keywords)
    ]
    assert splatted == []


def test_the_typed_fields_are_those_of_the_status() -> None:
    model = {name: field.annotation for name, field in DDPJobStatus.model_fields.items()}
    assert set(Owned.__annotations__) == set(model)


def test_only_admission_admits_a_job() -> None:
    admitting = [module for module, tree in MODULES.items() if any(calls(tree, "Admitted"))]
    assert admitting == ["manifests/admission.py"]


@pytest.mark.parametrize("module", MODULES)
def test_no_function_takes_more_than_four_parameters(module: str) -> None:
    assert list(too_long(MODULES[module])) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a, b, c, d): ...", []),
        ("class A:\n def f(self, a, b, *, c, d): ...", []),
        ("def f(a, b, c, d, e): ...", ["f"]),
        ("async def f(a, /, b, *, c, d, e): ...", ["f"]),
    ],
)
def test_the_count_of_parameters_is_right(source: str, found: list[str]) -> None:
    assert list(too_long(ast.parse(source))) == found
