"""Read jobs from YAML files, with the code that they name. Problems are reported with their line numbers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpjob_operator.api import KIND
from ddpjob_operator.cli.documents import STDIN, BadFile, Document, read_documents
from ddpjob_operator.cli.pod_check import pod_problems
from ddpjob_operator.cli.trainer_check import trainer_problems
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.submit.job import Content, Submission, with_packed_code
from ddpjob_operator.submit.pack import BadCode
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

_PATH = re.compile(r"[A-Za-z_][\w.\[\]/-]*(?=: )")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_LIMIT = 253
_NAMESPACE_LIMIT = 63


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check_files` found: the valid jobs with their files, and one line for each problem of the others."""

    valid: tuple[tuple[str, Job], ...]
    problems: tuple[str, ...]


def read_job(name: str, exclude: Iterable[Path] = ()) -> Submission:
    """The only DDPJob of a file (`-`: standard input), with its code but for what is below `exclude`. Documents of
    other kinds are ignored.

    It is a new job: a new uid, created now, without a status.

    Raises:
        BadFile: with every problem, if it cannot be run as written, or is one of several.
    """
    jobs, problems = _read_jobs(name, exclude)
    if problems:
        raise BadFile(tuple(problems))
    if len(jobs) > 1:
        names = ", ".join(found.job.name for _, found in jobs)
        raise BadFile((f"{name}: contains {len(jobs)} jobs ({names}); name a file with one",))
    return jobs[0][1]


def check_job(content: Content, exclude: Iterable[Path] = ()) -> Submission:
    """A job that was made from options: its code is relative to the working directory.

    Raises:
        BadFile: with every problem.
    """
    found, problems = _checked(content, Path(), exclude)
    if found is None:
        raise BadFile(tuple(problems))
    return found


def check_files(names: Iterable[str]) -> Checked:
    """Check all DDPJobs of files as the operator, the API server and the built-in trainer would."""
    valid: list[tuple[str, Job]] = []
    problems: list[str] = []
    taken: dict[tuple[str, str], str] = {}
    for name in names:
        jobs: list[tuple[Document, Submission]] = []
        try:
            jobs, found = _read_jobs(name)
            problems += found
        except BadFile as refusal:
            problems += refusal.problems
        for document, submission in jobs:
            job = submission.job
            place = document.place("metadata.name")
            if other := taken.get((job.namespace, job.name)):
                problems.append(
                    f"{place}: metadata.name: {job.name} is the name of the job at {other}, too; rename one of them"
                )
            else:
                taken[job.namespace, job.name] = place
                valid.append((name, job))
    return Checked(tuple(valid), tuple(problems))


def _read_jobs(name: str, exclude: Iterable[Path] = ()) -> tuple[list[tuple[Document, Submission]], list[str]]:
    """The jobs of a file that are valid, and the problems of the others."""
    documents = read_documents(name)
    base = Path() if name == STDIN else Path(name).parent
    jobs: list[tuple[Document, Submission]] = []
    problems: list[str] = []
    for document in documents:
        if not document.is_job and len(documents) > 1:
            continue
        valid, found = _checked(document.content, base, exclude)
        lines = [f"{document.place(_path_of(problem))}: {problem}" for problem in found]
        lines += [
            f"{document.at(line)}: {key}: duplicate key; remove one of them" for line, key in document.duplicate_keys
        ]
        problems += lines
        if valid is not None and not lines:
            jobs.append((document, valid))
    if not jobs and not problems:
        problems.append(f"{name}: contains no document of kind {KIND}; add one")
    return jobs, problems


def _checked(content: Any, base: Path, exclude: Iterable[Path]) -> tuple[Submission | None, list[str]]:
    """A job if it is valid, and its problems if it is not. `base`: the folder that its code is relative to."""
    try:
        content, code = with_packed_code(content, base, exclude)
    except BadCode as error:
        return None, [str(error)]
    found: list[str] = []
    job = None
    try:
        job = _job(content)
    except InvalidJob as error:
        found += error.problems
    found += [problem for problem in _beyond_the_schema(content) if _is_new(problem, found)]
    return (None if job is None or found else Submission(job, content, code)), found


def _beyond_the_schema(content: Any) -> Iterator[str]:
    if isinstance(content, dict) and isinstance(spec := content.get("spec") or {}, dict):
        yield from pod_problems(content.get("metadata"), spec)
        yield from trainer_problems(spec)


def _is_new(problem: str, found: Iterable[str]) -> bool:
    """Whether nothing was said of this field yet, nor of one that it is in."""
    path = _path_of(problem)
    return not any(path == (said := _path_of(other)) or path.startswith((f"{said}.", f"{said}[")) for other in found)


def _job(content: Any) -> Job:
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
