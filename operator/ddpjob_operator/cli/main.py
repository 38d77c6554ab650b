"""The commands of `ddpjob`. They import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddpjob_operator.local.output import Logs

_REFUSED = 2


class Output(StrEnum):
    """How an answer is printed."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(
    name="ddpjob",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from ddpjob_operator.settings import VERSION

        print(f"ddpjob {VERSION}")
        raise typer.Exit


@app.callback()
def ddpjob(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Validate a DDPJob, run it on this machine, and ask a cluster what became of it."""


JobFile = Annotated[str, typer.Argument(metavar="FILE", help="YAML file with a DDPJob; - reads standard input.")]


@app.command()
def run(
    file: JobFile,
    shared: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory to use as /mnt/shared: data sets, snapshots, logs."),
    ] = Path("shared"),
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Inject a fault: kill-rank@50% kills the highest rank with SIGKILL after half of the steps, "
            "kill-rank=0@50% kills rank 0. The exit code is 1 if the run ends before the fault.",
        ),
    ] = None,
    logs: Annotated[
        Logs,
        typer.Option(help="Whose output to show: of all ranks, of rank 0 (rank), or none. The log files have all."),
    ] = Logs.RANK,
) -> None:
    """Run a DDPJob on this machine, without a cluster, root or Docker.

    Restarts, snapshots and messages are the same as on a cluster. Ctrl-C saves a snapshot and stops the run; the same
    command resumes it. Exit codes: 0 succeeded, 1 failed, 2 invalid file or unsuitable machine, 130 stopped by Ctrl-C.
    """
    from ddpjob_operator.cli.documents import BadFile
    from ddpjob_operator.cli.job_file import read_job
    from ddpjob_operator.cli.run import run as run_here

    try:
        job = read_job(file)
    except BadFile as error:
        raise _refused(error.problems) from None
    raise typer.Exit(run_here(job, shared, chaos, logs))


@app.command()
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="YAML files with DDPJobs; - reads standard input.")
    ],
) -> None:
    """Validate all DDPJobs in files, offline, as the operator, the API server and the built-in trainer would.

    Every problem is one line: file, line, field, value and fix. Exit codes: 0 all valid, 2 invalid.
    """
    from ddpjob_operator.cli.job_file import check_files

    checked = check_files(dict.fromkeys(files))
    for file, job in checked.valid:
        print(f"{file}: {job.name} is valid: {job.size_in_words}")
    if checked.problems:
        raise _refused(checked.problems)


JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a DDPJob.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job; by default that of the context.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; by default its current one.")]


@app.command()
def why(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TEXT,
) -> None:
    """Say why a job on a cluster is where it is: what ended it, what it waits for, what was lost, and what to do.

    Exit codes: 0 answered, 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, show_why

    raise typer.Exit(show_why(Cluster(context, namespace), name, output is Output.JSON))


@app.command()
def watch(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Show a job on a cluster live until it has ended: phase, progress, loss, pods, snapshots, events.

    Ctrl-C ends the view, not the job. Exit codes: 0 succeeded, 1 failed, 2 no such job, or the cluster refused,
    130 Ctrl-C.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, show_watch

    raise typer.Exit(show_watch(Cluster(context, namespace), name))


@app.command()
def suspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Suspend a job on a cluster: its pods save a snapshot and end. `ddpjob unsuspend` resumes it from there.

    Exit codes: 0 done, 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, change

    said = f"{name} is suspended: its pods save a snapshot and end"
    raise typer.Exit(change(Cluster(context, namespace), name, {"suspend": True}, said))


@app.command()
def unsuspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Resume a suspended job on a cluster from its newest snapshot.

    Exit codes: 0 done, 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, change

    said = f"{name} resumes from its newest snapshot"
    raise typer.Exit(change(Cluster(context, namespace), name, {"suspend": False}, said))


@app.command()
def scale(
    name: JobName,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes from the next attempt on.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Give an elastic job on a cluster another number of nodes. It resumes with them from a new snapshot.

    Exit codes: 0 done, 2 no such job, or the cluster refused, as for a job that is not elastic.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, change

    said = f"{name} resumes with {nodes} nodes"
    raise typer.Exit(change(Cluster(context, namespace), name, {"nodes": nodes}, said))


@app.command()
def logs(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only the ranks of this node rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Of this attempt; by default the newest.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last so many of these lines of each pod.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DURATION", help="Only newer lines, such as 10m.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
) -> None:
    """Print what the ranks of a job on a cluster print, in one stream, each line with its rank.

    Exit codes: 0 printed, or with --follow succeeded; 1 with --follow failed; 2 no such job, or the cluster refused.
    """
    import re

    from ddpjob_operator.cli.on_cluster import Cluster, seconds, show_logs
    from ddpjob_operator.follow.logs import Wanted

    try:
        pattern = re.compile(grep) if grep is not None else None
        since_seconds = seconds(since) if since is not None else None
    except re.error as error:
        raise _refused((f"--grep: {grep!r} is not a regular expression: {error}",)) from None
    except ValueError as error:
        raise _refused((f"--since: {error}",)) from None
    if rank is not None and node is not None:
        raise _refused(("--rank, --node: a rank is on one node; give one of them",))
    wanted = Wanted(node=node, rank=rank, attempt=attempt, pattern=pattern, tail=tail, since_seconds=since_seconds)
    raise typer.Exit(show_logs(Cluster(context, namespace), name, wanted, follow))


def _refused(problems: tuple[str, ...]) -> typer.Exit:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(_REFUSED)


def main() -> None:
    """Entry point of `ddpjob` and `kubectl-ddpjob`."""
    from ddpjob_operator.cli.output import outlive_readers

    outlive_readers()
    called_as = Path(sys.argv[0]).name
    app(prog_name="kubectl ddpjob" if called_as.startswith("kubectl") else "ddpjob")


if __name__ == "__main__":
    main()
