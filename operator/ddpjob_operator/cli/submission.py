"""What `ddpjob submit` and `ddpjob run` are given: a YAML file, or a script and options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpjob_operator.cli.documents import BadFile
from ddpjob_operator.cli.job_file import read_job
from ddpjob_operator.submit.check import BadJob, check
from ddpjob_operator.submit.job import Content, ScriptOptions, Submission, resuming, script_job, with_resume
from ddpjob_operator.submit.owner import with_owner


@dataclass(frozen=True, slots=True)
class Given:
    """The command line. Options that were not given are None."""

    target: str
    args: Sequence[str] = ()
    options: Mapping[str, str | int | None] | None = None
    """Of ScriptOptions, by their names."""
    env: Sequence[str] = ()
    links: Sequence[str] = ()
    fresh: bool | None = None
    """Whether to begin anew; None leaves it to the job."""
    owner: str | None = None
    """None leaves it to the job."""

    @property
    def is_script(self) -> bool:
        return self.target.endswith(".py")


def read_given(given: Given, exclude: Iterable[Path] = ()) -> Submission:
    """The job, with its code but for what is below `exclude`.

    Raises:
        BadFile: with every problem, if it cannot be run as written.
    """
    if given.is_script:
        try:
            return _with_resume(check(content_of(given), Path(), exclude), given)
        except BadJob as error:
            raise BadFile(error.problems) from None
    extra = [f"--{name.replace('_', '-')}" for name, value in (given.options or {}).items() if value is not None]
    extra += ["--env"] if given.env else []
    extra += ["--link"] if given.links else []
    extra += ["the arguments after --"] if given.args else []
    if extra:
        raise BadFile((f"{', '.join(extra)}: for a script; {given.target} has fields for it, so set them there",))
    submission = read_job(given.target, exclude)
    return _with_resume(replace(submission, content=_with_owner(submission.content, given)), given)


def written(given: Given, submission: Submission) -> Content:
    """The job as a file has it: of a script, with `code: {path: .}`."""
    if not given.is_script:
        return submission.content
    content = content_of(given)
    return content if given.fresh is None else with_resume(content, own=given.fresh)


def _with_resume(submission: Submission, given: Given) -> Submission:
    return submission if given.fresh is None else resuming(submission, own=given.fresh)


def _with_owner(content: Content, given: Given) -> Content:
    if given.owner is None:
        return content
    try:
        return with_owner(content, given.owner)
    except ValueError as error:
        raise BadFile((f"--owner: {error}",)) from None


def content_of(given: Given) -> Content:
    """The DDPJob of a script, with `code: {path: .}`.

    Raises:
        BadFile: the script is not in this folder, a variable has no value, a link is none, or the owner is too long.
    """
    script, here = Path(given.target), Path.cwd().resolve()
    if not script.resolve().is_relative_to(here):
        raise BadFile((f"{script}: is not below {here}; change to the folder that has the code, as for torchrun",))
    if not script.is_file():
        raise BadFile((f"{script}: there is no such file",))
    options = {name: value for name, value in (given.options or {}).items() if value is not None}
    requirements = Path(str(options.get("requirements", "")))
    if "requirements" in options and requirements.resolve().is_relative_to(here):
        options["requirements"] = _inside(requirements, here).as_posix()
    env, links = _variables(given.env), _links(given.links)
    written = ScriptOptions(**options, env=env, args=tuple(given.args), links=links)  # type: ignore[arg-type]
    try:
        content = script_job(_inside(script, here).as_posix(), written)
    except ValueError as error:
        raise BadFile((f"--link {error}",)) from None
    return _with_owner(content, given)


def _inside(file: Path, here: Path) -> Path:
    """Its path in this folder, to which a link may lead: the shell's $PWD has it, the working directory has not."""
    place = file.parent.resolve() / file.name  # one that is a link itself is sent by its own name
    return (place if place.is_relative_to(here) else file.resolve()).relative_to(here)


def _variables(given: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals and name not in os.environ:
            raise BadFile((f"--env {name}: is not set in this shell; write --env {name}=VALUE",))
        found[name] = value if equals else os.environ[name]
    return found


def _links(given: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in given:
        name, equals, url = item.partition("=")
        if not equals:
            raise BadFile((f"--link {item}: has no name; write --link NAME={item}",))
        found[name] = url
    return found
