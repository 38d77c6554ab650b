"""What several commands have in common: arguments, options, and how a refusal is printed."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

SUCCEEDED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


class GlobalOptions:
    """Of the command itself, before the verb."""

    kubeconfig: str | None = None

    @classmethod
    def to_copy(cls) -> tuple[str, ...]:
        """Them again, in a command for another shell."""
        return () if cls.kubeconfig is None else ("--kubeconfig", cls.kubeconfig)


class Output(StrEnum):
    """How an answer is printed."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


class Form(StrEnum):
    """How DDPJobs are printed, as kubectl calls it."""

    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class ObjectForm(StrEnum):
    """How one object that was created is printed, as kubectl calls it."""

    NAME = "name"
    JSON = "json"
    YAML = "yaml"


JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a DDPJob.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job; by default that of the context.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; by default its current one.")]
Kubeconfig = Annotated[
    str | None, typer.Option(metavar="FILE", help="Kubeconfig to use; by default $KUBECONFIG or ~/.kube/config.")
]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="YAML file with a DDPJob (- reads standard input), or a Python script: it trains with the code of this "
        "folder.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--filename", "-f", metavar="FILE", help="The same as FILE, as kubectl has it."),
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARG...", help="Arguments of the script.")]
ScriptName = Annotated[str | None, typer.Option("--name", help="Name of the job; by default that of the script.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of pods; by default 1.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of each pod, and ranks unless --procs-per-node is given.")]
Procs = Annotated[int | None, typer.Option(min=1, help="Ranks in each pod; by default one, or one for each GPU.")]
Image = Annotated[str | None, typer.Option(help="Container image; by default the operator's.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="Environment variable; without a value, this shell's."),
]
Links = Annotated[
    list[str] | None,
    typer.Option("--link", metavar="NAME=URL", help="A link on the page of the job (`ddpjob dashboard`), at most 8."),
]
Owner = Annotated[
    str | None,
    typer.Option(
        "--owner",
        metavar="OWNER",
        help="Who answers for the job: a team, a person, an e-mail address, for metrics and notifications. By default "
        "what the file says, else your user name on this machine; empty for none.",
    ),
]
Requirements = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Requirements file of the folder; its packages are installed on the volume."),
]
Fresh = Annotated[
    bool | None,
    typer.Option(
        "--fresh/--resume",
        help="Begin anew and set snapshots of an earlier job of this name aside, or resume from them. By default a "
        "job resumes, but begins anew where it replaces one on a cluster that has succeeded. Files that the script has "
        "written itself stay in work/NAME.",
    ),
]
Claim = Annotated[str | None, typer.Option(help="Existing PersistentVolumeClaim to use; by default one is created.")]
Shared = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder that `ddpjob run` had as --shared, or where the volume is mounted."),
]
JobForm = Annotated[
    Form | None,
    typer.Option("--output", "-o", help="wide has more columns; json and yaml are the object; name is its name only."),
]

Created = Annotated[
    ObjectForm | None,
    typer.Option("--output", "-o", help="Print the object that is created and nothing else, and do not wait for it."),
]


def target_of(file: str | None, filename: str | None) -> str:
    """The file or script that a command is given in one of two ways; raises the exit for both and for none."""
    if file is not None and filename is not None:
        raise refused((f"FILE, -f: {file} and {filename} are both given; leave out one of them",))
    if (target := file if filename is None else filename) is None:
        raise refused(("FILE: is not given; name a YAML file with a DDPJob, or a Python script",))
    return target


def refused(problems: tuple[str, ...]) -> typer.Exit:
    """Print one line a problem; the caller raises the result."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(REFUSED)


def seconds(text: str) -> int:
    """Seconds of such as `90s`, `10m`, `1h30m` (Go's time.ParseDuration, whole units).

    Raises:
        ValueError: it is none; the message says how to write one.
    """
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or found is None:
        raise ValueError(f"{text!r} is not a duration; write one such as 90s, 10m or 1h30m")
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + rest
