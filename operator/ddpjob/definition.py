"""What to train: a script or a function of a folder, and on how many nodes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob import cell
from ddpjob.handle import AsyncJob
from ddpjob.sync import Job, run
from ddpjob_operator.runtime.client import connect
from ddpjob_operator.runtime.login import CLI
from ddpjob_operator.submit.check import BadJob, check
from ddpjob_operator.submit.job import Content, ScriptOptions, Submission, script_job
from ddpjob_operator.submit.kubectl_yaml import dump
from ddpjob_operator.submit.owner import with_owner
from ddpjob_operator.submit.send import send

CALL = "ddp_trainer.call"
"""The trainer's module that calls a function of submitted code."""


@dataclass(frozen=True, kw_only=True)
class DDPJob(ScriptOptions):
    """A job that can be submitted. Name a `script` or a `function`; `spec` has every other field, as YAML has it."""

    script: str | None = None
    """Path of a Python file in `folder`."""
    function: Callable[..., Any] | None = None
    """A function of a module in `folder`, or of a notebook cell, of which nothing else is sent. Every rank calls it
    with `kwargs`.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the function, as far as JSON has them."""
    folder: str | Path = "."
    """Is sent with the job, without what .gitignore and .ddpjobignore list."""
    owner: str | None = None
    """Who answers for the job: a team, a person, an e-mail address, for metrics and notifications. By default the user
    on this machine who submits it; empty for none.
    """
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `spec`, such as `{"snapshots": {"every": "60seconds"}}`; they win."""

    def submission(self) -> Submission:
        """The job with its packed code.

        Raises:
            BadJob: with every problem, one line each.
        """
        source = self._source_of_cell()
        added = {} if source is None else {f"{cell.MODULE}.py": source.encode()}
        submission = check(self.content(), Path(self.folder), added=added)
        if self.function is not None and submission.code is not None:
            file = self._target().partition(":")[0].replace(".", "/")
            if not {f"{file}.py", f"{file}/__init__.py"} & submission.code.paths:
                raise BadJob((f"function: {file}.py is not in {self.folder}; set folder to the one that has it",))
        return submission

    def content(self) -> Content:
        """The DDPJob as YAML would have it, with `code: {path: .}`.

        Raises:
            BadJob: there is not one of script and function, the function cannot be imported, a link is none, or the
                owner is too long.
        """
        if (self.script is None) == (self.function is None):
            raise BadJob(("script, function: name one of them",))
        if self.function is not None and not hasattr(self.function, "__qualname__"):  # functools.partial, or an object
            said = f"function: {self.function!r} has no name to import it by"
            raise BadJob((f"{said}; pass a function of a file, and what it takes in kwargs",))
        try:
            content = script_job(self._script(), self)
        except ValueError as error:
            raise BadJob((f"links: {error}",)) from None
        if self.function is not None:
            content["metadata"]["name"] = self.name or re.sub(r"_+", "-", self.function.__name__.lower()).strip("-")
            content["spec"]["entrypoint"] = {"module": CALL}
            content["spec"]["args"] = [self._target(), self._kwargs()]
        content["spec"] |= self.spec
        if self.owner is None:
            return content
        try:
            return with_owner(content, self.owner)
        except ValueError as error:
            raise BadJob((f"owner: {error}",)) from None

    def to_yaml(self) -> str:
        """A file for `ddpjob submit` and `ddpjob run`.

        Raises:
            BadJob: as `content`, or the function is one of a notebook cell, which no file has.
        """
        if self._source_of_cell() is not None:
            raise BadJob(("function: is in a notebook cell, which a YAML file does not have; write it into a file",))
        return dump(self.content())

    def submit(self, *, namespace: str | None = None, context: str | None = None, replace: bool = False) -> Job:
        """Send it to a cluster, by default the current one of the kubeconfig. `replace` ends a job of that name that
        has not finished; one that has is replaced in any case.

        Raises:
            BadJob: it cannot be run as written.
            ApiError: the cluster refused.
        """
        return Job(run(self.submit_async(namespace=namespace, context=context, replace=replace)))

    async def submit_async(
        self, *, namespace: str | None = None, context: str | None = None, replace: bool = False
    ) -> AsyncJob:
        """`submit` for asyncio."""
        submission = self.submission()
        for text in submission.code.left_out if submission.code is not None else ():
            _note(f"left out: {text}")
        client = await connect(context=context, agent=CLI)
        try:
            place = namespace or client.namespace
            sent = await send(client, place, submission, replace=replace, note=_note)
        except BaseException:
            await client.close()
            raise
        return AsyncJob(client, place, submission.job.name, sent.job["metadata"]["uid"])

    def _script(self) -> str:
        """Its path in the folder; `__file__` is one of this machine."""
        script, folder = self.script or "", Path(self.folder).resolve()
        place = Path(script).parent.resolve() / Path(script).name
        is_inside = Path(script).is_absolute() and place.is_relative_to(folder)
        return place.relative_to(folder).as_posix() if is_inside else script

    def _target(self) -> str:
        """`package.module:function`."""
        function = self.function
        assert function is not None
        module, name = function.__module__, function.__qualname__
        if module == "__main__":  # of the program that runs now, which the ranks import by its name
            module = _name_of_program() or (cell.MODULE if self._source_of_cell() is not None else "")
        if not module or "<" in name:
            raise BadJob((f"function: {name} cannot be imported; define it at the top of a file in the folder",))
        return f"{module}:{name}"

    def _source_of_cell(self) -> str | None:
        """The module with a function of a notebook cell; None for every other function."""
        function = self.function
        if function is None or function.__module__ != "__main__":
            return None
        if set("<.") & set(getattr(function, "__qualname__", "<")):
            return None
        if getattr(sys.modules["__main__"], "__file__", None):
            return None
        try:
            return cell.source_of(function)
        except ValueError as error:
            raise BadJob((f"function: {error}",)) from None

    def _kwargs(self) -> str:
        try:
            return json.dumps(dict(self.kwargs), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadJob((f"kwargs: {error}; pass text, numbers, lists and dicts",)) from None


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _name_of_program() -> str | None:
    """Of `python -m`, the module that it runs; of a script, that of its file. None in a notebook or at a prompt."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":  # as a profiler calls a script that it runs
        return str(spec.name)
    return Path(file).stem if file else None
