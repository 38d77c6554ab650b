"""Read a `Job` from a YAML file. Problems are reported with their line numbers."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ddpjob_operator.api import KIND
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

_STDIN = "-"
_PATH = re.compile(r"[A-Za-z_][\w.\[\]/-]*(?=: )")
_STEP = re.compile(r"[^.\[\]]+")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_LIMIT = 253
_NAMESPACE_LIMIT = 63


class BadFile(Exception):
    """A file that cannot be run as written. `problems` has one line each, such as `job.yaml:7: spec.nodes: 0 is …`."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class _Document:
    """One document of a file: what it says, and where."""

    content: Any
    node: yaml.Node

    @property
    def is_job(self) -> bool:
        return isinstance(self.content, dict) and self.content.get("kind") == KIND

    def line(self, path: str) -> int:
        """The line, from 1, of the field at `path`, or of the nearest that is there."""
        node, line = self.node, self.node.start_mark.line
        for step in _STEP.findall(path):
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return line + 1


def read_jobs(name: str) -> tuple[Job, ...]:
    """All DDPJobs in a file (`-`: standard input). Documents of other kinds are ignored.

    Each is a new job: a new uid, created now, without a status.

    Raises:
        BadFile: with every problem of every job in the file.
    """
    documents = _parse_yaml(name, _read(name))
    jobs, problems = [], []
    for document in documents:
        if not document.is_job and len(documents) > 1:
            continue
        try:
            jobs.append(_job(document))
        except InvalidJob as error:
            problems += [f"{name}:{document.line(_path_of(problem))}: {problem}" for problem in error.problems]
        problems += [f"{name}:{line}: {problem}" for line, problem in _duplicates(document.node)]
    if not jobs and not problems:
        problems.append(f"{name}: contains no document of kind {KIND}; add one")
    if problems:
        raise BadFile(tuple(problems))
    return tuple(jobs)


def read_job(name: str) -> Job:
    """The only DDPJob of a file.

    Raises:
        BadFile: if it cannot be run as written, or is one of several.
    """
    jobs = read_jobs(name)
    if len(jobs) > 1:
        names = ", ".join(job.name for job in jobs)
        raise BadFile((f"{name}: contains {len(jobs)} jobs ({names}); `ddpjob run` needs a file with one",))
    return jobs[0]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == _STDIN else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadFile((f"{name}: {cause}; name a YAML file with a {KIND}",)) from error


def _parse_yaml(name: str, text: str) -> list[_Document]:
    loader = yaml.SafeLoader(text)
    documents = []
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            documents.append(_Document(loader.construct_document(node), node))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        cause = getattr(error, "problem", None) or error
        raise BadFile((f"{name}{line}: is not valid YAML: {cause}; check indentation and quotes",)) from error
    finally:
        loader.dispose()
    return [document for document in documents if document.content is not None]


def _job(document: _Document) -> Job:
    content = document.content
    if not isinstance(content, dict):
        raise InvalidJob((f"{type(content).__name__}: must be an object with apiVersion, kind, metadata and spec",))
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key) or {}, dict):
            raise InvalidJob((f"{key}: must be an object; indent its fields below it",))
    metadata = content.get("metadata") or {}
    problems = tuple(_bad_names(metadata))
    born = {"uid": str(uuid.uuid4()), "creationTimestamp": datetime.now(UTC).replace(microsecond=0).isoformat()}
    fresh = {key: value for key, value in content.items() if key != "status"}
    fresh["metadata"] = {key: metadata[key] for key in ("name", "namespace") if metadata.get(key)} | born
    try:
        job = parse_job(fresh, strict=True)
    except InvalidJob as error:
        raise InvalidJob((*problems, *error.problems)) from error
    if problems:
        raise InvalidJob(problems)
    return job


def _bad_names(metadata: dict[str, Any]) -> Iterator[str]:
    """Names that an API server would reject (RFC 1123). They become paths and labels."""
    for key, limit in (("name", _NAME_LIMIT), ("namespace", _NAMESPACE_LIMIT)):
        value = metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > limit or not _NAME.fullmatch(value):
            yield (
                f"metadata.{key}: {value!r} is not a valid name; use lower-case letters, digits, - and ., "
                f"beginning and ending with a letter or digit, at most {limit} characters"
            )


def _path_of(problem: str) -> str:
    match = _PATH.match(problem)
    return match[0] if match else ""


def _child(node: yaml.Node, step: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line, value
    if isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
        item = node.value[int(step)]
        return item.start_mark.line, item
    return None


def _duplicates(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Duplicate keys in a mapping. YAML parsers silently keep the last one."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                yield key.start_mark.line + 1, f"{key.value}: duplicate key; remove one of them"
            seen.add(str(key.value))
            yield from _duplicates(value)
