"""The YAML documents of a file, with the line of every field, in bounded time and memory.

A file may come from anybody. Aliases that multiply, cycles and deep nesting are refused by a first pass over its
events, which builds nothing.
"""

from __future__ import annotations

import errno
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ddpjob_operator.api import KIND
from ddpjob_operator.submit.kubectl_yaml import READ, TRUTH

STDIN = "-"
MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""Scalars, lists and mappings of a document, each as often as aliases repeat it: far more than an API server takes."""
MAX_DEPTH = 64


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """What has no quotes is the number, the truth value or the text that it is for kubectl."""

    yaml_implicit_resolvers: ClassVar = READ
    bool_values: ClassVar = TRUTH


def _float(loader: Any, node: yaml.ScalarNode) -> Any:
    """One that is too large for a number, as the hash 7e12345 would be, is a text for kubectl."""
    number: float = loader.construct_yaml_float(node)
    return number if math.isfinite(number) or "n" in node.value.lower() else node.value


_Loader.add_constructor("tag:yaml.org,2002:float", _float)


_STEP = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")


class BadFile(Exception):
    """A file that cannot be run as written. `problems` has one line each, such as `job.yaml:7: spec.nodes: 0 is …`."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file: what it says, and where."""

    file: str
    number: int | None
    """Its place in the file, from 1, with empty ones counted; None if it is the only one that is not empty."""
    content: Any
    node: yaml.Node
    duplicate_keys: tuple[tuple[int, str], ...]
    """Line and name of each key that stands twice in a mapping. YAML parsers silently keep the last one."""

    @property
    def is_job(self) -> bool:
        return isinstance(self.content, dict) and self.content.get("kind") == KIND

    def place(self, path: str) -> str:
        """Where the field at `path` is, or the nearest that is there: `job.yaml:7`, with the document of several."""
        return self.at(self.line(path))

    def at(self, line: int) -> str:
        return f"{self.file}:{line}" + (f" (document {self.number})" if self.number is not None else "")

    def line(self, path: str) -> int:
        """The line, from 1, of the field at `path`, or of the nearest that is there."""
        node, line = self.node, self.node.start_mark.line
        for bracketed, plain in _STEP.findall(path):
            found = _child(node, bracketed or plain)
            if found is None:
                break
            line, node = found
        return int(line) + 1


def read_documents(name: str) -> list[Document]:
    """The documents of a file (`-`: standard input) that are not empty.

    Raises:
        BadFile: if it cannot be read, or is no YAML of a reasonable size.
    """
    text = _read(name)
    _refuse_bombs(name, text)
    found: list[tuple[Any, yaml.Node, tuple[tuple[int, str], ...]]] = []
    loader = _Loader(text)
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            twice = tuple(_duplicates(node, set()))  # before construction writes what `<<` merges into the mappings
            found.append((loader.construct_document(node), node, twice))
    except yaml.YAMLError as error:
        raise BadFile((_not_yaml(name, text, error),)) from error
    except (ValueError, LookupError, AttributeError) as error:  # a date, a number or a truth value that is none
        raise BadFile((f"{name}: is not valid YAML: {error}; write the value in quotes",)) from error
    finally:
        loader.dispose()
    documents = [(number, *each) for number, each in enumerate(found, start=1) if each[0] is not None]
    return [
        Document(name, number if len(documents) > 1 else None, content, node, twice)
        for number, content, node, twice in documents
    ]


def _read(name: str) -> str:
    try:
        data = _read_stdin() if name == STDIN else _read_file(Path(name))
        if len(data) > MAX_BYTES:
            raise BadFile((f"{name}: is larger than {MAX_BYTES >> 20} MiB; name a YAML file with a {KIND}",))
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadFile((f"{name}: {cause}; name a YAML file with a {KIND}",)) from error


def _read_stdin() -> bytes:
    """As bytes: Python decodes standard input by the locale, and hides what is not text of it."""
    if sys.stdin is None:  # closed, as by `<&-`
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer.read(MAX_BYTES + 1)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _not_yaml(name: str, text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    cause = getattr(error, "problem", None) or error
    if mark and text[mark.index : mark.index + 1] == "\t":
        return f"{name}{line}: is not valid YAML: a tab; indent with spaces"
    return f"{name}{line}: is not valid YAML: {cause}; check indentation and quotes"


def _refuse_bombs(name: str, text: str) -> None:
    sizes: dict[str, int] = {}
    parents: list[tuple[str | None, int]] = []
    nodes = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.DocumentStartEvent):
                sizes, parents, nodes = {}, [], 0
            elif isinstance(event, yaml.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in parents):
                    raise _refusal(name, event, f"*{event.anchor} contains itself; remove the alias")
                nodes += sizes.get(event.anchor or "", 1)
            elif isinstance(event, yaml.NodeEvent):
                nodes += 1
                if isinstance(event, yaml.ScalarEvent):
                    sizes[event.anchor or ""] = 1
                else:
                    parents.append((event.anchor, nodes))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = parents.pop()
                sizes[anchor or ""] = nodes - before + 1
            if len(parents) > MAX_DEPTH:
                raise _refusal(name, event, f"is nested deeper than {MAX_DEPTH} levels; no {KIND} is")
            if nodes > MAX_NODES:
                raise _refusal(name, event, f"has more than {MAX_NODES:,} values with its aliases; no {KIND} has")
    except yaml.YAMLError as error:
        raise BadFile((_not_yaml(name, text, error),)) from error


def _refusal(name: str, event: yaml.Event, why: str) -> BadFile:
    line = f":{event.start_mark.line + 1}" if event.start_mark else ""
    return BadFile((f"{name}{line}: {why}",))


def _child(node: yaml.Node, step: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # what `<<` has merged comes first
            if key.value == step:
                return key.start_mark.line, value
    if isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
        item = node.value[int(step)]
        return item.start_mark.line, item
    return None


def _duplicates(node: yaml.Node, visited: set[int]) -> Iterator[tuple[int, str]]:
    if id(node) in visited:  # by another alias
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item, visited)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                yield key.start_mark.line + 1, key.value
            seen.add(str(key.value))
            yield from _duplicates(value, visited)
