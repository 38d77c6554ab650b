"""How long it takes from an edited line to its output, with `ddpjob submit` and with `ddpjob run`.

    python -m tests.cluster.bench_submit [--rounds 5]

The floors, which take turns with them: on the cluster, two pods by hand on the same volumes whose only command is to
print a line, from `kubectl apply` to that line in `kubectl logs`; on this machine, plain torchrun with the same script.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.cluster.byhand import MADE_BY_SERVER
from tests.cluster.installation import cluster_started, load_images, operator_installed
from tests.cluster.kube import Kubectl, Object
from tests.cluster.scenario import NODES
from tests.support.command import COMMAND, to_cluster

from ddpjob_operator.core.manifests.code import VOLUME

TARGET = 10.0
"""Seconds beyond the floor."""

SCRIPT = "print('line {}', flush=True)\n"
PATIENCE_SECONDS = 120.0


def seconds_to(line: str, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> float:
    """From the start of a command until it prints a line; it is waited for."""
    began = time.monotonic()
    printed = None
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    output = []
    for text in process.stdout:
        output.append(text)
        if printed is None and line in text:
            printed = time.monotonic()
    code = process.wait(PATIENCE_SECONDS)
    assert (code, printed is not None) == (0, True), "".join(output)
    return (printed or 0.0) - began


def submitted(kubectl: Kubectl, folder: Path, turn: int) -> float:
    (folder / "train.py").write_text(SCRIPT.format(turn))
    command = [*COMMAND, "submit", "train.py", "--nodes", str(NODES), "-n", kubectl.namespace]
    return seconds_to(f"line {turn}", command, folder, to_cluster(kubectl.kubeconfig))


def by_hand(kubectl: Kubectl, specs: Sequence[Object], turn: int) -> float:
    """Pods of the job without their launcher, until one of them has printed its line."""
    names = [f"hand-{turn}-{rank}" for rank in range(len(specs))]
    began = time.monotonic()
    kubectl.apply(*(_printing(name, spec) for name, spec in zip(names, specs, strict=True)))
    while time.monotonic() - began < PATIENCE_SECONDS:
        if "line" in kubectl.run("logs", "-f", names[0], check=False).stdout:
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"{names[0]} printed nothing within {PATIENCE_SECONDS:g} s")


def _printing(name: str, spec: Object) -> Object:
    (container,) = spec["containers"]
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] != VOLUME]
    volumes = [volume for volume in spec["volumes"] if volume["name"] != VOLUME]
    changed = {**container, "command": ["python", "-u", "-c", "print('line')"], "args": [], "volumeMounts": mounts}
    changed_spec = {**spec, "containers": [changed], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": changed_spec}


def run_here(folder: Path, turn: int) -> float:
    (folder / "train.py").write_text(SCRIPT.format(turn))
    return seconds_to(f"line {turn}", [*COMMAND, "run", "train.py", "--procs-per-node", "2"], folder)


def torchrun(folder: Path, turn: int) -> float:
    (folder / "train.py").write_text(SCRIPT.format(turn))
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    return seconds_to(f"line {turn}", started, folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.bench_submit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: %(default)s)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, cluster_started() as kubectl:
        with operator_installed(kubectl, load_images()):
            own = kubectl.within(f"ddpjob-bench-submit-{secrets.token_hex(3)}")
            kubectl.run("create", "namespace", own.namespace)
            try:
                submitted(own, Path(folder), 0)  # makes the claim, and fills every cache
                specs = [
                    {key: value for key, value in pod["spec"].items() if key not in MADE_BY_SERVER}
                    for pod in own.list("pods")
                ]
                for turn in range(1, rounds + 1):
                    found.setdefault("pods by hand", []).append(by_hand(own, specs, turn))
                    found.setdefault("ddpjob submit", []).append(submitted(own, Path(folder), turn))
            finally:
                own.delete("namespace", own.namespace)
        for turn in range(rounds + 1):
            here, plain = run_here(Path(folder), turn), torchrun(Path(folder), turn)
            if turn:
                found.setdefault("torchrun", []).append(plain)
                found.setdefault("ddpjob run", []).append(here)
    return report(found)


def report(found: dict[str, list[float]]) -> int:
    """Print medians; 1 if a target is missed, else 0."""
    table = Table(title="seconds from an edited line to its output: median (least to most)")
    for column in ("", "seconds", "beyond the floor"):
        table.add_column(column, justify="left" if not column else "right")
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    floors = {"ddpjob submit": "pods by hand", "ddpjob run": "torchrun"}
    for kind, seconds in found.items():
        beyond = f"{medians[kind] - medians[floors[kind]]:+.2f}" if kind in floors else ""
        table.add_row(kind, f"{medians[kind]:.2f} ({min(seconds):.2f} to {max(seconds):.2f})", beyond)
    console = Console(width=100)
    console.print(table)
    missed = [kind for kind, floor in floors.items() if medians[kind] - medians[floor] > TARGET]
    for kind, floor in floors.items():
        console.print(f"{kind}: at most {TARGET:g} s beyond {floor}: {'missed' if kind in missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
