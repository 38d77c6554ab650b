"""`ddpjob snapshots …`. The commands import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpjob_operator.cli.parameters import Context, JobName, Namespace, Output, Shared

app = typer.Typer(
    name="snapshots",
    no_args_is_help=True,
    help="List, verify, export, restore and remove the snapshots of a job, on a cluster or (--shared) in a folder.",
)

Image = Annotated[
    str | None, typer.Option(help="Trainer image of the pod that reads the volume; by default that of the job.")
]
Step = Annotated[int | None, typer.Option(min=0, help="Only the snapshot of this step.")]


@app.command()
def ls(
    name: JobName,
    shared: Shared = None,
    on_volume: Annotated[
        bool, typer.Option("--on-volume", help="All that the volume has, which a short-lived pod reads.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    image: Image = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print them.")] = Output.TEXT,
) -> None:
    """List snapshots, the newest first: of a job on a cluster those on record in its status.

    Exit codes: 0 listed, also if there is none, 2 no such job or folder, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.snapshots import show_here, show_on_volume, show_record

    if shared is not None:
        raise typer.Exit(show_here(shared, name, output))
    cluster = Cluster(context, namespace)
    raise typer.Exit(show_on_volume(cluster, name, image, output) if on_volume else show_record(cluster, name, output))


@app.command()
def verify(
    name: JobName,
    shared: Shared = None,
    step: Step = None,
    namespace: Namespace = None,
    context: Context = None,
    image: Image = None,
) -> None:
    """Read snapshots to the last byte and compare their checksums; on a cluster in a short-lived pod.

    There it needs permission to create, get and delete pods, as do ls --on-volume, restore and rm; the ClusterRole
    `edit` grants it. Exit codes: 0 all match, 1 one does not, 2 no such job or folder, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.snapshots import run_here, run_in_pod

    options = () if step is None else ("--step", str(step))
    if shared is not None:
        raise typer.Exit(run_here(shared, name, "verify", options))
    raise typer.Exit(run_in_pod(Cluster(context, namespace), name, "verify", options, image))


@app.command()
def export(
    name: JobName,
    shared: Shared = None,
    step: Step = None,
    state: Annotated[str, typer.Option(help="Which state to export.")] = "model",
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where to write model.pt and model.safetensors.")] = Path(),
    namespace: Namespace = None,
    context: Context = None,
    image: Image = None,
) -> None:
    """Write the newest valid model of a job as model.pt and model.safetensors, into a folder of this machine.

    Of a job on a cluster, which may run, a short-lived pod writes them to its own disk, and they are read from there
    and compared by SHA-256. That needs permission to create, get and delete pods and to get and create pods/exec; the
    ClusterRole `edit` grants it. With --shared it needs torch. Exit codes: 0 written, 1 no valid snapshot, or no such
    state, 2 no such job or folder, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.snapshots import export_from_cluster, run_here

    if shared is None:
        raise typer.Exit(export_from_cluster(Cluster(context, namespace), name, to, state, step, image))
    options = ("--state", state, "--to", str(to), *(() if step is None else ("--step", str(step))))
    raise typer.Exit(run_here(shared, name, "export", options))


@app.command()
def restore(
    name: JobName,
    step: Annotated[int, typer.Option(min=0, help="The snapshot of this step.")],
    shared: Shared = None,
    namespace: Namespace = None,
    context: Context = None,
    image: Image = None,
) -> None:
    """Have a job begin its next attempt from this snapshot, once it has verified. Not while it runs: suspend it first.

    The next attempt moves newer snapshots to checkpoints/NAME/aside, from where they can be restored too, and only rm
    removes them. It begins with ddpjob unsuspend NAME, or for a job that has ended with ddpjob submit --resume.
    Exit codes: 0 done, 1 there is none of that step or it does not verify, 2 the job runs, no such job or folder, or
    the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.snapshots import run_here, run_in_pod

    options = ("--step", str(step))
    if shared is not None:
        raise typer.Exit(run_here(shared, name, "restore", options))
    raise typer.Exit(run_in_pod(Cluster(context, namespace), name, "restore", options, image))


@app.command()
def rm(
    name: JobName,
    step: Annotated[list[int], typer.Option(min=0, help="The snapshots of this step; may be repeated.")],
    shared: Shared = None,
    namespace: Namespace = None,
    context: Context = None,
    image: Image = None,
) -> None:
    """Remove snapshots of a job that does not run. Without its newest ones, a job resumes from an older one.

    Exit codes: 0 removed, 1 there is none of that step, 2 the job runs, no such job or folder, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.snapshots import run_here, run_in_pod

    options = [text for number in step for text in ("--step", str(number))]
    if shared is not None:
        raise typer.Exit(run_here(shared, name, "rm", options))
    raise typer.Exit(run_in_pod(Cluster(context, namespace), name, "rm", options, image))
