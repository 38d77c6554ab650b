"""The commands of `ddpjob`. What they need is imported when they run, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_REFUSED = 2

app = typer.Typer(
    name="ddpjob",
    help="Fault-tolerant PyTorch DDP runs: try a DDPJob on this machine, check it before kubectl apply.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[str, typer.Argument(metavar="FILE", help="A YAML file with a DDPJob; - reads standard input.")]


@app.command()
def run(
    file: JobFile,
    shared: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder that stands for /mnt/shared: data sets, snapshots, logs."),
    ] = Path("shared"),
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Prove that the job survives a crash: kill-rank@50% kills the highest rank with SIGKILL halfway; "
            "kill-rank=0@50% names one. Exit code 1 if the run ended before.",
        ),
    ] = None,
) -> None:
    """Run a DDPJob on this machine: no cluster, no root, no Docker.

    Restarts, snapshots and messages are those of the cluster. Ctrl-C saves a snapshot and stops; the same command
    resumes. Exit code: 0 Succeeded, 1 Failed, 2 the file or the machine cannot run it, 130 stopped by Ctrl-C.
    """
    from ddpjob_operator.cli.job_file import BadFile, read_job
    from ddpjob_operator.cli.run import run as run_here

    try:
        job = read_job(file)
    except BadFile as error:
        raise _refused(error.problems) from None
    raise typer.Exit(run_here(job, shared, chaos))


@app.command()
def validate(file: JobFile) -> None:
    """Check every DDPJob of a file as the operator would, offline. Exit code: 0 all are fine, 2 one is not."""
    from ddpjob_operator.cli.job_file import BadFile, read_jobs

    try:
        jobs = read_jobs(file)
    except BadFile as error:
        raise _refused(error.problems) from None
    for job in jobs:
        print(f"{file}: {job.name} is valid: {job.size_in_words}")


def _refused(problems: tuple[str, ...]) -> typer.Exit:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(_REFUSED)


def main() -> None:
    """Entry point of `ddpjob` and `kubectl-ddpjob`."""
    called_as = Path(sys.argv[0]).name
    app(prog_name="kubectl ddpjob" if called_as.startswith("kubectl") else "ddpjob")


if __name__ == "__main__":
    main()
