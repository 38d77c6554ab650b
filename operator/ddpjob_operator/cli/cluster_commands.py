"""The commands of `ddpjob` that ask a cluster. They import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpjob_operator.cli.parameters import Context, JobForm, JobName, Namespace, Output, Shared, refused, seconds

app = typer.Typer()


@app.command()
def ls(
    namespace: Namespace = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")] = False,
    context: Context = None,
    output: JobForm = None,
) -> None:
    """List the jobs on a cluster, the newest first.

    A terminal that is too narrow gets fewer columns; a pipe gets all. Exit codes: 0 listed, also if there is none,
    2 the cluster refused.
    """
    from ddpjob_operator.cli.jobs import show_list
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(show_list(Cluster(context, namespace), everywhere, output))


@app.command()
def get(name: JobName, namespace: Namespace = None, context: Context = None, output: JobForm = None) -> None:
    """Show one job on a cluster in a few lines: phase, progress, snapshot, volume, the last failure.

    Exit codes: 0 shown, 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.jobs import show_job
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(show_job(Cluster(context, namespace), name, output))


def _check_folder_options(namespace: str | None, context: str | None) -> None:
    if namespace is not None or context is not None:
        raise refused(("--shared: a folder has no namespaces and contexts; leave those options out",))


@app.command()
def why(
    name: JobName,
    shared: Shared = None,
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TEXT,
) -> None:
    """Explain the state of a job: what ended it, what it waits for, what slows it, what was lost, and what to do.

    The job is on a cluster or (--shared) in a folder. Exit codes: 0 answered, 2 no such job, or the cluster refused.
    """
    if shared is not None:
        from ddpjob_operator.cli.folder import explain_in_folder

        _check_folder_options(namespace, context)
        raise typer.Exit(explain_in_folder(shared, name, output))
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.why import explain_on_cluster

    raise typer.Exit(explain_on_cluster(Cluster(context, namespace), name, output))


@app.command()
def debug(
    name: JobName,
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long the pod is there at most, such as 2h.")
    ] = "30m",
    any_node: Annotated[
        bool, typer.Option("--any-node", help="On any Kubernetes node, not only on that of the failure.")
    ] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="With the failed pod's GPUs and requests, which must be free.")
    ] = False,
    image: Annotated[str | None, typer.Option(help="Image of the pod; by default that of the failed one.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Open a shell in a pod like the one that failed: its node, image, volumes, environment and security context.

    The pod runs `sleep` beside the job, which does not see it, and is deleted when the shell ends. Without a terminal
    or kubectl, the kubectl command is printed, and the pod is deleted at Ctrl-C or after --for. Beyond the role
    ddpjob-operator-submit it takes the rights to create, get and delete pods and to create pods/exec, as the role edit
    has them. Exit codes: that of the shell, 0 at the end of --for, 2 no such job, nothing has failed, or the cluster
    refused, 130 Ctrl-C.
    """
    from ddpjob_operator.cli.debug import debug as debug_job
    from ddpjob_operator.cli.on_cluster import Cluster

    try:
        limit = seconds(duration)
    except ValueError as error:
        raise refused((f"--for: {error}",)) from None
    if limit == 0:
        raise refused((f"--for: {duration} is no time; write such as 30m",))
    raise typer.Exit(debug_job(Cluster(context, namespace), name, limit, any_node=any_node, gpus=gpus, image=image))


@app.command()
def doctor(
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TEXT,
) -> None:
    """Say what in a cluster would stop a job of yours in a namespace, and how to mend it.

    Each check is one line: the API, your rights, the operator, admission webhooks, a dry run of a job and of its pod,
    Pod Security, quota, limits, storage, nodes, GPUs, the trainer image, NetworkPolicies, service meshes, clocks. What
    you may not read is unknown. It changes nothing. In a pod, `python -m ddp_trainer.doctor` under torchrun tests GPUs
    and collectives. Exit codes: 0 no problem, 1 a problem, 2 the cluster could not be asked.
    """
    from ddpjob_operator.cli.doctor import show_doctor
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(show_doctor(Cluster(context, namespace), output))


@app.command()
def version(
    client_only: Annotated[bool, typer.Option("--client", help="Only that of this command; ask no cluster.")] = False,
    context: Context = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print it.")] = Output.TEXT,
) -> None:
    """Print the version of this command and, where the cluster answers, that of each operator in it.

    It takes the right to list deployments; without it, or without a cluster, the operator's is unknown. Exit codes:
    0 printed.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.version import show_version

    raise typer.Exit(show_version(Cluster(context), output, client_only=client_only))


@app.command()
def code(
    name: JobName,
    folder: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New folder to write it to; by default NAME-code.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Get the code back that a job on a cluster was submitted with, file by file, verified by its digest.

    Exit codes: 0 written, 2 no such job, no submitted code, or the cluster refused.
    """
    from ddpjob_operator.cli.code import get_code
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(get_code(Cluster(context, namespace), name, folder or Path(f"{name}-code")))


@app.command()
def watch(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Show a job on a cluster live until it has ended: phase, progress, loss, goodput, pods, slowest ranks, events.

    Ctrl-C ends the view, not the job. Exit codes: 0 succeeded, 1 failed, 2 no such job, or the cluster refused,
    130 Ctrl-C.
    """
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.cli.watch import show_watch

    raise typer.Exit(show_watch(Cluster(context, namespace), name))


@app.command()
def events(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="How to print it: json is one object a line.")
    ] = Output.TEXT,
) -> None:
    """Print what happened to a job on a cluster, its pods and its claim, oldest first, times in UTC.

    Events of pods that are gone are shown too, as long as the API server keeps them: an hour by default. Exit codes:
    0 printed, or with --follow succeeded; 1 with --follow failed; 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.events import show_events
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(show_events(Cluster(context, namespace), name, follow, output))


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
    """Resume a suspended job on a cluster from its newest snapshot, or the one that was restored.

    Exit codes: 0 done, 2 no such job, or the cluster refused.
    """
    from ddpjob_operator.cli.on_cluster import Cluster, change

    said = f"{name}: training resumes"
    raise typer.Exit(change(Cluster(context, namespace), name, {"suspend": False}, said))


@app.command()
def cancel(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the volume of a job that would delete it (shared.retain: false).")
    ] = False,
    unasked: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal it is never asked.")] = (
        False
    ),
    wait: Annotated[bool, typer.Option("--wait", help="Return when no pod of the job is left.")] = False,
) -> None:
    """End a job on a cluster: its pods save a snapshot and end, and the DDPJob is deleted. Its volume is kept.

    The same job, applied again, resumes from its newest snapshot. `ddpjob suspend` keeps the DDPJob. Exit codes: 0
    done, 1 not confirmed, 2 no such job, one that has ended, or the cluster refused, 130 Ctrl-C.
    """
    from ddpjob_operator.cli.cancel import cancel as cancel_job
    from ddpjob_operator.cli.on_cluster import Cluster

    raise typer.Exit(cancel_job(Cluster(context, namespace), name, keep=keep, unasked=unasked, wait=wait))


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
    from ddpjob_operator.core.values.job import in_words

    said = f"{name} resumes with {in_words(nodes, 'node')}"
    raise typer.Exit(change(Cluster(context, namespace), name, {"nodes": nodes}, said))


@app.command()
def logs(
    name: JobName,
    shared: Shared = None,
    namespace: Namespace = None,
    context: Context = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended, or the attempt that is named.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Only the ranks of this node rank.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Of this attempt; by default the newest.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last so many of these lines of each pod.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DURATION", help="Only newer lines, such as 10m.")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Only lines that match.")] = None,
    on_volume: Annotated[
        bool,
        typer.Option(
            "--on-volume", help="From the volume also where pods are left, for those that are gone; not with --follow."
        ),
    ] = False,
    claim: Annotated[
        str | None,
        typer.Option(help="Claim with the volume of a job that is gone; by default the operator's, NAME-shared."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Trainer image of the pod that reads the volume; by default that of the job.")
    ] = None,
) -> None:
    """Print what the ranks of a job print, each line with its rank: in one stream from a cluster, node after node from
    a folder (--shared), which has the logs of pods that are gone too.

    On a terminal each rank has a colour, unless NO_COLOR is set. Once the pods are gone, and once the DDPJob is, a
    short-lived pod reads the logs from the volume, while that is there; Ctrl-C deletes it. Beyond the role
    ddpjob-operator-submit it takes the rights to create, get and delete pods and to get persistentvolumeclaims, as the
    role edit has them. Exit codes: 0 printed, or with --follow succeeded, or the job goes on after the attempt; 1 with
    --follow failed; 2 no such job or volume, or the cluster refused, 130 Ctrl-C.
    """
    import re

    from ddpjob_operator.follow.lines import Wanted

    try:
        pattern = re.compile(grep) if grep is not None else None
        since_seconds = seconds(since) if since is not None else None
    except re.error as error:
        raise refused((f"--grep: {grep!r} is not a regular expression: {error}",)) from None
    except ValueError as error:
        raise refused((f"--since: {error}",)) from None
    if since_seconds == 0:
        raise refused((f"--since: {since} is no time; write such as 10m, or --tail 0 for new lines only",))
    if rank is not None and node is not None:
        raise refused(("--rank, --node: a rank is on one node; give one of them",))
    wanted = Wanted(node=node, rank=rank, attempt=attempt, pattern=pattern, tail=tail, since_seconds=since_seconds)
    if shared is not None:
        from ddpjob_operator.cli.folder import show_folder_logs

        _check_folder_options(namespace, context)
        if on_volume or claim is not None or image is not None:
            raise refused(("--on-volume, --claim, --image: with --shared the folder is read here; leave them out",))
        if follow and tail is not None and (wanted.is_selective or node is not None or since is not None):
            raise refused(("--tail: with --shared and --follow it counts all lines; leave it or the selection out",))
        raise typer.Exit(show_folder_logs(shared, name, wanted, follow=follow))
    if on_volume and follow:
        raise refused(("--on-volume, --follow: the volume is read as it is; leave one of them out",))
    from ddpjob_operator.cli.logs import show_logs
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.follow.job_lines import Volume

    volume = Volume(on_volume, claim, image)
    raise typer.Exit(show_logs(Cluster(context, namespace), name, wanted, follow, volume))


@app.command()
def drain_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of a Kubernetes node.")],
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="DURATION", help="How long to wait for the pods, such as 30m.")
    ] = "10m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    context: Context = None,
) -> None:
    """Take a Kubernetes node out of service for jobs: cordon it, evict their pods, and wait until these are gone.

    It says what follows for each job, and evicts pods of DDPJobs only; use `kubectl drain` for the others. An eviction
    that a PodDisruptionBudget refuses is tried again until --timeout. It may be run again, and goes on then. It takes
    the rights to get and patch nodes, to list pods in all namespaces, to create pods/eviction and to get ddpjobs. Exit
    codes: 0 drained, also if no pod of a job was there, 1 pods are still there after --timeout, 2 no such node, or the
    cluster refused, 130 Ctrl-C, after which the node stays cordoned.
    """
    from ddpjob_operator.cli.drain_node import drain_node as drain
    from ddpjob_operator.cli.on_cluster import Cluster

    try:
        limit = seconds(timeout)
    except ValueError as error:
        raise refused((f"--timeout: {error}",)) from None
    if limit == 0:
        raise refused((f"--timeout: {timeout} is no time; write such as 10m",))
    raise typer.Exit(drain(Cluster(context), node, limit, dry_run=dry_run))
