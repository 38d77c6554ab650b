"""What several commands have in common: arguments, options, and how a refusal is printed."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

REFUSED = 2


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


JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a DDPJob.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job; by default that of the context.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; by default its current one.")]
JobForm = Annotated[
    Form | None,
    typer.Option("--output", "-o", help="wide has more columns; json and yaml are the object; name is its name only."),
]


def refused(problems: tuple[str, ...]) -> typer.Exit:
    """Print one line a problem; the caller raises the result."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(REFUSED)
