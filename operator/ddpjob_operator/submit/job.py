"""A job as a person writes it, with `code: {path: .}` or as a script and options, made into what the API has."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.home import expanded
from ddpjob_operator.submit.pack import FETCHED, NOTHING, BadCode, PackedCode, name_of, pack, pattern_that_sends
from ddpjob_operator.wire.links import annotations_of_links

Content = dict[str, Any]
"""A DDPJob as JSON."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that can be sent, or run here."""

    job: Job
    content: Content
    """As the API server gets it."""
    code: PackedCode | None = None


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What `ddpjob submit SCRIPT` takes besides the script; None is the default of the field."""

    name: str | None = None
    """By default that of the script."""
    nodes: int = 1
    gpus: int | None = None
    """In each pod."""
    procs_per_node: int | None = None
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    requirements: str | None = None
    """Path of a requirements file in the folder."""
    claim: str | None = None
    """An existing PersistentVolumeClaim."""
    args: Sequence[str] = ()
    """Of the script."""
    links: Mapping[str, str] = field(default_factory=dict)
    """URLs by their names, for its page: Grafana, W&B and the like."""


def script_job(script: str, options: ScriptOptions) -> Content:
    """The DDPJob of a script in this folder, with `code: {path: .}`.

    Raises:
        ValueError: one of the links is none.
    """
    spec: Content = {"nodes": options.nodes, "entrypoint": {"script": Path(script).as_posix()}, "code": {"path": "."}}
    if options.requirements is not None:
        spec["code"]["requirements"] = PurePosixPath(options.requirements).as_posix()
    if options.args:
        spec["args"] = list(options.args)
    if options.image is not None:
        spec["image"] = options.image
    if options.procs_per_node is not None:
        spec["procsPerNode"] = options.procs_per_node
    if options.gpus is not None:
        spec["resources"] = {"limits": {"nvidia.com/gpu": options.gpus}}
    if options.env:
        spec["env"] = [{"name": name, "value": value} for name, value in options.env.items()]
    if options.claim is not None:
        spec["shared"] = {"claimName": options.claim}
    name = options.name or re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or "train"
    metadata: Content = {"name": name}
    if options.links:
        metadata["annotations"] = annotations_of_links(options.links)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def resuming(submission: Submission, *, own: bool) -> Submission:
    """The same job, which resumes from its own snapshots only, or from those of any job of its name."""
    content = with_resume(submission.content, own=own)
    job = replace(submission.job, spec=DDPJobSpec.model_validate(content["spec"]))
    return replace(submission, content=content, job=job)


def with_resume(content: Content, *, own: bool) -> Content:
    """A DDPJob with this `spec.snapshots.resume`."""
    spec = content.get("spec") or {}
    snapshots = {**(spec.get("snapshots") or {}), "resume": "Own" if own else "Any"}
    return {**content, "spec": {**spec, "snapshots": snapshots}}


def says_what_to_resume(submission: Submission) -> bool:
    return "resume" in (submission.content["spec"].get("snapshots") or {})


def with_packed_code(
    content: Any, base: Path, exclude: Iterable[Path] = (), added: Mapping[str, bytes] = NOTHING
) -> tuple[Any, PackedCode | None]:
    """A job whose `spec.code.path`, relative to `base`, has become names of ConfigMaps and a digest.

    One without that field, or of another form than a DDPJob's, is returned as it is.

    Raises:
        BadCode: the folder cannot be sent, or has not what the job names. The message begins with the field.
    """
    spec: Any = _field(content, "spec")
    code: Any = _field(spec, "code")
    if "path" not in (code if isinstance(code, dict) else ()):
        return content, None
    if both := sorted({"configMaps", "sha256"} & code.keys()):
        raise BadCode(f"spec.code.path: {code['path']!r} is packed now, and {both[0]} is of packed code; keep one")
    if not isinstance(code["path"], str):
        raise BadCode(f"spec.code.path: {code['path']!r} is not a path; write the folder with the script")
    try:
        packed = pack(base / expanded(Path(code["path"])), exclude, added)
    except BadCode as error:
        raise BadCode(f"spec.code.path: {error}") from error
    except OSError as error:  # a name that is too long, or a folder that may not be entered
        named = f"{error.filename}: {error.strerror}; name the folder that has the script"
        raise BadCode(f"spec.code.path: {named}") from error
    script = _field(_field(spec, "entrypoint"), "script")
    for where, path in (("spec.entrypoint.script", script), ("spec.code.requirements", code.get("requirements"))):
        if isinstance(path, str) and not path.startswith("/") and ".." not in path and path not in packed.paths:
            raise BadCode(f"{where}: {_missing(path, packed)}")
    sent = {
        **{name: value for name, value in code.items() if name != "path"},
        "configMaps": [name_of(part) for part in packed.parts],
        "sha256": packed.sha256,
    }
    return {**content, "spec": {**spec, "code": sent}}, packed


def _field(value: Any, name: str) -> Any:
    """None where there is none: the job has not been validated yet."""
    return value.get(name) if isinstance(value, dict) else None


def _missing(path: str, packed: PackedCode) -> str:
    for folder in PurePosixPath(path).parents[:-1]:
        if _is_there(packed.folder / folder / FETCHED):
            return f"{path!r} is left out, because `ddpjob code` wrote {folder}; submit from that folder, or move it"
    if _is_there(packed.folder / path):
        plain = os.path.relpath(os.path.realpath(packed.folder / path), os.path.realpath(packed.folder))
        if plain in packed.paths:
            return f"{path!r} is {plain} of that folder; write its path so"
        sends = pattern_that_sends(packed.folder, path)
        return f"{path!r} is left out, because git or .ddpjobignore ignores it; add `{sends}` to .ddpjobignore"
    close = difflib.get_close_matches(path, packed.paths, n=1)
    hint = f"did you mean {close[0]}?" if close else "write its path in that folder"
    return f"{path!r} is not in {packed.folder}; {hint}"


def _is_there(path: Path) -> bool:
    """False for a text that is too long for a path, such as a program in place of one."""
    try:
        return path.exists()
    except OSError:
        return False
