"""`ddpjob dashboard`. It imports its modules when it runs, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpjob_operator.cli.parameters import Context, Namespace, refused

app = typer.Typer()


@app.command()
def dashboard(
    shared: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of `ddpjob run`, or a mounted volume, instead of a cluster; with --volume-of beside it.",
        ),
    ] = None,
    volume_of: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE/CLAIM",
            help="Jobs of the cluster, with what their volume has: that of this claim, mounted at --shared; '*': DIR "
            "has a folder NAMESPACE/CLAIM of each.",
        ),
    ] = None,
    namespace: Namespace = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")] = False,
    context: Context = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8265,
    address: Annotated[
        str, typer.Option(help="Address to listen on. Anybody who reaches it sees all that you see.")
    ] = "127.0.0.1",
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TITLE=URL", help="A link on the page of each job; {name}, {namespace} and {uid} are the job's."
        ),
    ] = None,
) -> None:
    """Show jobs as web pages, on a cluster or (--shared) in a folder, until Ctrl-C. It changes nothing.

    With --shared and --volume-of, a cluster with the mounted volume of its jobs: logs of pods that are gone, every
    step, and jobs whose DDPJob is deleted.

    Exit codes: 0 ended by Ctrl-C, 2 no such folder, the port is taken, or there is no cluster.
    """
    from ddpjob_operator.cli.dashboard import show_cluster, show_folder
    from ddpjob_operator.cli.on_cluster import Cluster
    from ddpjob_operator.home import expanded
    from ddpjob_operator.page.links import parse_template
    from ddpjob_operator.page.volumes import Volumes

    if shared is None and volume_of is not None:
        raise refused((f"--volume-of {volume_of}: name the folder where the volume is mounted, with --shared",))
    if shared is not None and volume_of is None and (namespace is not None or everywhere or context is not None):
        raise refused(
            (
                "--shared: a folder has no namespaces and contexts; leave those options out, or say with --volume-of "
                "whose volume it is",
            )
        )
    if namespace is not None and everywhere:
        raise refused(("--namespace, --all-namespaces: give one of them",))
    try:
        links = [parse_template(text) for text in link or ()]
    except ValueError as error:
        raise refused((f"--link {error}",)) from None
    if shared is not None and volume_of is None:
        raise typer.Exit(show_folder(shared, address, port, links))
    try:
        volumes = Volumes.at(expanded(shared), volume_of) if shared is not None and volume_of is not None else None
    except ValueError as error:
        raise refused((str(error),)) from None
    raise typer.Exit(show_cluster(Cluster(context, namespace), everywhere, address, port, links, volumes))
