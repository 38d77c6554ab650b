"""Whether a job can be run as written: what the operator, the API server and the built-in trainer would say of it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpjob_operator.api import KIND
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.submit.job import Submission, with_packed_code
from ddpjob_operator.submit.pack import NOTHING, BadCode
from ddpjob_operator.submit.pod_check import pod_problems
from ddpjob_operator.submit.trainer_check import trainer_problems
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

_PATH = re.compile(r"[A-Za-z_][\w.\[\]/-]*(?=: )")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_LIMIT = 253
_NAMESPACE_LIMIT = 63
_PREFIX_LIMIT = 58
_GENERATED = "xxxxx"
_NO_GENERATED_NAME = (
    "is for `kubectl create` alone, and a job resumes from the snapshots of its name, which would be another one each "
    "time; write metadata.name"
)


class BadJob(ValueError):
    """A job that cannot be run as written. `problems` has one line each: field, value, fix."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def check(content: Any, base: Path, exclude: Iterable[Path] = (), added: Mapping[str, bytes] = NOTHING) -> Submission:
    """A new job, with the code that it names relative to `base`, but for what is below `exclude`, and with the files
    `added` by their paths: it has a new uid, is created now, and has no status.

    Raises:
        BadJob: with every problem.
    """
    try:
        content, code = with_packed_code(content, base, exclude, added)
    except BadCode as error:
        raise BadJob((str(error),)) from error
    found: list[str] = []
    job = None
    try:
        job = _job(content)
    except InvalidJob as error:
        found += error.problems
    found += [problem for problem in _beyond_the_schema(content) if _is_new(problem, found)]
    if job is None or found:
        raise BadJob(tuple(found))
    return Submission(job, content, code)


def as_created(content: Any) -> Any:
    """The object as `kubectl create` makes it: with a name in the place of metadata.generateName."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("name"):
        return content
    prefix = metadata.get("generateName")
    if not isinstance(prefix, str) or not prefix:
        return content
    return {**content, "metadata": {**metadata, "name": f"{prefix[:_PREFIX_LIMIT]}{_GENERATED}"}}


def path_of(problem: str) -> str:
    """The field that a problem is about; empty for none."""
    match = _PATH.match(problem)
    return match[0] if match else ""


def _beyond_the_schema(content: Any) -> Iterator[str]:
    if isinstance(content, dict) and isinstance(spec := content.get("spec") or {}, dict):
        yield from pod_problems(content.get("metadata"), spec)
        yield from trainer_problems(spec)


def _is_new(problem: str, found: Iterable[str]) -> bool:
    """Whether nothing was said of this field yet, nor of one that it is in."""
    path = path_of(problem)
    return not any(path == (said := path_of(other)) or path.startswith((f"{said}.", f"{said}[")) for other in found)


def _job(content: Any) -> Job:
    if not isinstance(content, dict):
        kind = "text" if isinstance(content, str) else "a list" if isinstance(content, list) else "a value"
        raise InvalidJob((f"{kind} is no job: write an object with apiVersion, kind, metadata and spec",))
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key, {}), dict | None):
            raise InvalidJob((f"{key}: must be an object; indent its fields below it",))
    if content.get("kind") == KIND and content.get("spec") is None:  # another kind is the greater problem
        raise InvalidJob(("spec: is missing; write spec: {} where all its defaults are meant",))
    metadata = content.get("metadata") or {}
    if not metadata.get("name") and metadata.get("generateName"):
        raise InvalidJob((f"metadata.generateName: {_NO_GENERATED_NAME}",))
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
