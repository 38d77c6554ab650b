"""Read jobs from YAML files, with the code that they name. Problems are reported with their line numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob_operator.api import KIND
from ddpjob_operator.cli.documents import STDIN, BadFile, Document, read_documents
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.submit.check import BadJob, as_created, check, path_of
from ddpjob_operator.submit.job import Submission


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


def check_files(names: Iterable[str]) -> Checked:
    """Check all DDPJobs of files as the operator, the API server and the built-in trainer would."""
    valid: list[tuple[str, Job]] = []
    problems: list[str] = []
    taken: dict[tuple[str, str], str] = {}
    for name in names:
        jobs: list[tuple[Document, Submission]] = []
        try:
            jobs, found = _read_jobs(name, created=True)
            problems += found
        except BadFile as refusal:
            problems += refusal.problems
        for document, submission in jobs:
            job = submission.job
            place = document.place("metadata.name")
            if job.name != _metadata(document).get("name"):  # one that is generated is no other's
                valid.append((name, job))
            elif other := taken.get((job.namespace, job.name)):
                problems.append(
                    f"{place}: metadata.name: {job.name} is the name of the job at {other}, too; rename one of them"
                )
            else:
                taken[job.namespace, job.name] = place
                valid.append((name, job))
    return Checked(tuple(valid), tuple(problems))


def _metadata(document: Document) -> dict[str, Any]:
    found: dict[str, Any] = document.content["metadata"]
    return found


def _read_jobs(
    name: str, exclude: Iterable[Path] = (), *, created: bool = False
) -> tuple[list[tuple[Document, Submission]], list[str]]:
    """The valid jobs of a file, and the problems of the others; `created`: as `kubectl create` has them."""
    documents = read_documents(name)
    base = Path() if name == STDIN else Path(name).parent
    jobs: list[tuple[Document, Submission]] = []
    problems: list[str] = []
    for document in documents:
        if not document.is_job and len(documents) > 1:
            continue
        valid: Submission | None = None
        found: tuple[str, ...] = ()
        try:
            valid = check(as_created(document.content) if created else document.content, base, exclude)
        except BadJob as error:
            found = error.problems
        lines = [f"{document.place(path_of(problem))}: {problem}" for problem in found]
        lines += [
            f"{document.at(line)}: {key}: duplicate key; remove one of them" for line, key in document.duplicate_keys
        ]
        problems += lines
        if valid is not None and not lines:
            jobs.append((document, valid))
    if not jobs and not problems:
        problems.append(f"{name}: contains no document of kind {KIND}; add one")
    return jobs, problems
