"""What the built-in trainer would say of a job's arguments, checked without it.

`trainer_flags.json` has its flags and what they take (docs/validate_tables.py). A script of one's own is not checked.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ddpjob_operator.api.spec import BUILT_IN_MODULE

_NUMBERS = {"int": (int, "a whole number"), "float": (float, "a number")}
_ON_ONE_RANK = ("single", "data_parallel")


def trainer_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """Each problem as field, value and fix. `spec` has not been validated."""
    args = spec.get("args") or []
    if not _is_built_in(spec.get("entrypoint")) or not isinstance(args, list):
        return
    if not all(isinstance(argument, str) for argument in args):
        return
    given: dict[str, str] = {}
    index = 0
    while index < len(args):
        path, argument = f"spec.args[{index}]", args[index]
        index += 1
        name, equals, value = argument.partition("=")
        kind = _kind(name)
        if argument in ("-h", "--help"):
            continue
        if not name.startswith("--"):
            yield f"{path}: {json.dumps(argument)} is not a flag; the built-in trainer takes flags and their values"
            continue
        if kind is None:
            close = difflib.get_close_matches(name, _table()["flags"], n=1)
            hint = f"did you mean {close[0]}?" if close else "`python -m ddp_trainer.train --help` lists all flags"
            yield f"{path}: {name} is not a flag of the built-in trainer; {hint}"
            if not equals and index < len(args) and not args[index].startswith("--"):
                index += 1  # most likely its value
            continue
        if kind == "bool":
            if equals:
                yield f"{path}: {argument} takes no value; write {name}, or --no-{name[2:]}"
            continue
        if not equals:
            if index == len(args) or args[index].startswith("--"):
                yield f"{path}: {name} needs a value; write it as the next item, or as {name}=VALUE"
                continue
            value, path, index = args[index], f"spec.args[{index}]", index + 1
        given[name] = value
        yield from _wrong_value(name, kind, value, path)
    yield from _wrong_size(spec, given)


def _is_built_in(entrypoint: Any) -> bool:
    if not isinstance(entrypoint, dict):
        return entrypoint is None
    return entrypoint.get("script") is None and entrypoint.get("module") in (None, BUILT_IN_MODULE)


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("trainer_flags.json").read_text())
    return found


def _kind(name: str) -> Any:
    flags = _table()["flags"]
    positive = f"--{name.removeprefix('--no-')}"
    return "bool" if name.startswith("--no-") and flags.get(positive) == "bool" else flags.get(name)


def _wrong_value(name: str, kind: Any, value: str, path: str) -> Iterator[str]:
    if isinstance(kind, list):
        if value not in kind:
            close = difflib.get_close_matches(value, kind, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(kind)}"
            yield f"{path}: {name} {json.dumps(value)} is not allowed; {hint}"
    elif kind in _NUMBERS:
        read, words = _NUMBERS[kind]
        try:
            read(value)
        except ValueError:
            yield f"{path}: {name} {json.dumps(value)} is not {words}; write one"
    elif kind == "key=value" and not value.partition("=")[0].isidentifier():
        yield f"{path}: {name} {json.dumps(value)} is not KEY=VALUE; write such as dropout=0.1"
    elif name == "--task" and ":" not in value and value not in _table()["tasks"]:
        close = difflib.get_close_matches(value, _table()["tasks"], n=1)
        if close:  # otherwise it may be an entry point of the image's
            yield f"{path}: --task {json.dumps(value)} is not a built-in task; did you mean {close[0]}?"


def _wrong_size(spec: Mapping[str, Any], given: Mapping[str, str]) -> Iterator[str]:
    """A number of ranks that the strategy, or the global batch, does not take. `--config` may say otherwise."""
    nodes, procs = spec.get("nodes", 1), spec.get("procsPerNode")
    if "--config" in given or spec.get("elastic") or not isinstance(nodes, int) or not isinstance(procs, int | None):
        return
    if procs is None and spec.get("resources"):
        return  # one for each GPU
    ranks, strategy = nodes * (procs or 1), given.get("--strategy", "ddp")
    if strategy in _ON_ONE_RANK:
        if ranks > 1:
            yield f"spec.nodes: --strategy {strategy} trains on one rank, and the job has {ranks}; use --strategy ddp"
        return
    try:
        batch = int(given.get("--global-batch", _table()["globalBatch"]))
    except ValueError:
        return
    if strategy != "pipeline" and ranks > 0 and batch % ranks:
        low = batch // ranks * ranks
        near = " or ".join(str(size) for size in (low, low + ranks) if size)
        yield f"spec.nodes: --global-batch {batch} cannot be divided among {ranks} ranks; use {near}"
