"""The commands of `ddpjob`. They import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from ddpjob_operator.cli import cluster_commands, dashboard_command, snapshot_commands
from ddpjob_operator.cli.parameters import (
    Claim,
    Context,
    Created,
    Env,
    Form,
    Fresh,
    GlobalOptions,
    Gpus,
    Image,
    Kubeconfig,
    Links,
    Namespace,
    Nodes,
    Owner,
    Procs,
    Requirements,
    ScriptArguments,
    ScriptName,
    Target,
    TargetOption,
    refused,
    target_of,
)
from ddpjob_operator.local.output import Logs

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
    ctx: typer.Context,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    context: Context = None,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Run a DDPJob or a script on this machine or on a cluster, and ask what became of it."""
    GlobalOptions.kubeconfig = kubeconfig
    if kubeconfig is not None:
        os.environ["KUBECONFIG"] = kubeconfig  # also for kubectl, which `ddpjob debug` runs
    given = {name: value for name, value in (("namespace", namespace), ("context", context)) if value is not None}
    ctx.default_map = _defaults(ctx.command, given)


def _defaults(command: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """What was given before the verb, as the default of every verb: what is given after it wins."""
    verbs = getattr(command, "commands", {})
    return dict(given) | {name: _defaults(verb, given) for name, verb in verbs.items()}


class _TakesScript(TyperCommand):
    """A command whose `--` separates its own options from those of the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As before, but none of the script's arguments is FILE, which may be given as -f; an unknown option may be one
        of the script.
        """
        end = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:end])
        except Exception as error:  # the class of an unknown option is typer's or click's, by version
            if (option := getattr(error, "option_name", None)) is not None and hasattr(error, "possibilities"):
                error.message = f"No such option: {option}; options of the script come after --"  # type: ignore[attr-defined]
                error.possibilities = [found for found in error.possibilities or () if found != "--help"]
            raise
        if of_script := args[end + 1 :]:
            ctx.params["args"] = [*(ctx.params["args"] or ()), *of_script]
        return rest


@app.command(cls=_TakesScript)
def run(
    file: Target = None,
    args: ScriptArguments = None,
    filename: TargetOption = None,
    name: ScriptName = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    procs_per_node: Procs = None,
    image: Image = None,
    env: Env = None,
    requirements: Requirements = None,
    claim: Claim = None,
    fresh: Fresh = None,
    shared: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory to use as /mnt/shared: data sets, snapshots, logs."),
    ] = Path("shared"),
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Inject a fault: kill-rank@50% kills the highest rank with SIGKILL after half of the steps, "
            "kill-rank=0@50% kills rank 0. kill-rank@100steps kills at a step, for a script that reports no total. The "
            "exit code is 1 if the run ends before the fault.",
        ),
    ] = None,
    logs: Annotated[
        Logs,
        typer.Option(help="Whose output to show: of all ranks, of rank 0 (rank), or none. The log files have all."),
    ] = Logs.RANK,
) -> None:
    """Run a DDPJob, or a script, on this machine, without a cluster, root or Docker.

    Restarts, snapshots and messages are the same as on a cluster. Ctrl-C saves a snapshot and stops the run; the
    same command resumes it, with --resume in place of --fresh. Exit codes: 0 succeeded, 1 failed, 2 invalid file or
    unsuitable machine, 130 stopped by Ctrl-C.
    """
    from ddpjob_operator.cli.documents import BadFile
    from ddpjob_operator.cli.run import run as run_here
    from ddpjob_operator.cli.submission import Given, read_given
    from ddpjob_operator.local.volume import written_by_runs

    options = {
        "name": name, "nodes": nodes, "gpus": gpus, "procs_per_node": procs_per_node, "image": image,
        "requirements": requirements, "claim": claim,
    }  # fmt: skip
    try:
        given = Given(target_of(file, filename), args or (), options, env or (), fresh=fresh)
        submission = read_given(given, exclude=written_by_runs(shared))
    except BadFile as error:
        raise refused(error.problems) from None
    raise typer.Exit(run_here(submission, shared, chaos, logs))


@app.command(cls=_TakesScript)
def submit(
    file: Target = None,
    args: ScriptArguments = None,
    filename: TargetOption = None,
    name: ScriptName = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    procs_per_node: Procs = None,
    image: Image = None,
    env: Env = None,
    requirements: Requirements = None,
    claim: Claim = None,
    link: Links = None,
    owner: Owner = None,
    namespace: Namespace = None,
    context: Context = None,
    fresh: Fresh = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Delete a job of this name that has not finished; its snapshots stay, unless shared.retain is false.",
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Do not wait for the job, nor show its output.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job as YAML, or as -o says, and send nothing.")
    ] = False,
    output: Created = None,
) -> None:
    """Send a job with its code to a cluster, and show its output until it has ended.

    A script trains with the code of this folder, without an image build: what git ignores, and what .ddpjobignore
    lists, stays here. In YAML, spec.code.path names the folder. A job of the same name that has finished is replaced:
    after a failure this one resumes from its snapshots, after a success it begins anew. Ctrl-C ends the output, not the
    job. Exit codes: 0 succeeded, 1 failed, 2 invalid, or the cluster refused, 130 Ctrl-C.
    """
    from ddpjob_operator.cli.documents import BadFile
    from ddpjob_operator.cli.jobs import print_object
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.submission import Given, read_given, written
    from ddpjob_operator.cli.submit import submit as submit_job

    options = {
        "name": name, "nodes": nodes, "gpus": gpus, "procs_per_node": procs_per_node, "image": image,
        "requirements": requirements, "claim": claim,
    }  # fmt: skip
    given = Given(target_of(file, filename), args or (), options, env or (), link or (), fresh, owner)
    form = None if output is None else Form(output)
    try:
        submission = read_given(given)
        if dry_run:
            print_object(written(given, submission), form or Form.YAML)
            return
    except BadFile as error:
        raise refused(error.problems) from None
    raise typer.Exit(submit_job(Cluster(context, namespace), submission, replace=replace, detach=detach, form=form))


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
        raise refused(checked.problems)


class Shell(StrEnum):
    """Shells that have a completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a script that completes verbs, options and names of jobs.

    \b
    bash: source <(ddpjob completion bash)              in ~/.bashrc
    zsh:  source <(ddpjob completion zsh)               in ~/.zshrc, after compinit
    fish: ddpjob completion fish | source               in ~/.config/fish/config.fish

    kubectl 1.26 or newer completes `kubectl ddpjob` by itself. Exit codes: 0 printed, 2 no such shell.
    """
    from ddpjob_operator.cli.completion import SCRIPTS

    print(SCRIPTS[shell], end="")


app.add_typer(cluster_commands.app)
app.add_typer(dashboard_command.app)
app.add_typer(snapshot_commands.app)


def main() -> None:
    """What `ddpjob` and `kubectl-ddpjob` do."""
    from ddpjob_operator.cli.completion import HIDDEN, print_candidates
    from ddpjob_operator.cli.output import outlive_readers, unwritten

    outlive_readers()
    if sys.argv[1:2] == [HIDDEN]:
        _complete(print_candidates, sys.argv[2:])
    called_as = Path(sys.argv[0]).name
    try:
        app(prog_name="kubectl ddpjob" if called_as.startswith("kubectl") else "ddpjob")
    except FileNotFoundError:
        from ddpjob_operator.local.volume import folder_is_gone

        if not folder_is_gone():
            raise
        print("error: the folder that you are in has been deleted; cd to one that exists", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if (problem := unwritten()) is not None:
            print(f"error: cannot write to standard output: {problem.strerror}", file=sys.stderr)
            sys.exit(end.code or 1)
        raise


def complete_for_kubectl() -> None:
    """What `kubectl_complete-ddpjob` does, which kubectl 1.26 and newer runs for `kubectl ddpjob <TAB>`."""
    from ddpjob_operator.cli.completion import print_for_kubectl

    _complete(print_for_kubectl, sys.argv[1:])


def _complete(print_for: Callable[[Any, Sequence[str]], None], words: Sequence[str]) -> NoReturn:
    """Print candidates and nothing else, and end without waiting for a request that is still under way."""
    logging.disable()
    print_for(typer.main.get_command(app), words)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
