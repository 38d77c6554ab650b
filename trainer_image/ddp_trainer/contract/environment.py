"""The only parser of the environment: variables of the operator and of torchrun become frozen values.

docs/contracts.md sections 1 and 2. Each process reads its part once: process 1 `parse_pod`, torchrun's agent
`parse_agent`, a rank `parse_rank` and `parse_job`. A UserError names each bad variable, its value and what to write.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.pod_logs import log_file

MAX_ATTEMPT: Final = 10**6 - 1
MAX_NODES: Final = 100_000
MAX_RANKS: Final = 1_000_000
MAX_PID: Final = 2**22
"""Of Linux (proc_sys_kernel(5), pid_max)."""

MAX_CREATED: Final = 10**12 - 1
MAX_KEEP: Final = 1_000_000
MAX_STEPS: Final = 10**9
SHUTDOWN_SECONDS: Final = 45.0
SNAPSHOT_RESUME: Final = ("Any", "Own")
"""Of `spec.snapshots.resume`; the first is the default."""
NON_FINITE_LOSS: Final = ("Warn", "Stop", "Rollback")
"""Of `spec.nonFiniteLossPolicy`; the first is the default."""

USAGE = (
    "python -m ddp_trainer.launch --module PACKAGE.MODULE [-- ARG...]\n"
    "       python -m ddp_trainer.launch --script PATH.py [-- ARG...]"
)


@dataclass(frozen=True, slots=True)
class Target:
    """What every rank runs: `kind` is module or script, `name` its dotted name or its path."""

    kind: str
    name: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Node rank `node_rank` of `nodes` in an attempt; None for a spare."""

    attempt: int
    node_rank: int | None
    nodes: int

    def __str__(self) -> str:
        place = "a spare" if self.node_rank is None else f"node rank {self.node_rank} of {self.nodes}"
        return f"attempt {self.attempt}, {place}"


@dataclass(frozen=True, slots=True)
class SubmittedCode:
    """The folder that was submitted with the job (`spec.code`), as it comes into the pod."""

    archives: Path
    """The directory of its parts, `00.tar.gz` and so on."""

    sha256: str
    """Of the tree (docs/contracts.md section 2), not of the archives."""

    requirements: str | None = None
    """The requirements file to install, as a path below the folder."""


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """The variables of docs/contracts.md section 2 that process 1 itself acts on."""

    job: str
    namespace: str
    uid: str
    attempt: int
    node_rank: int | None
    """None for a spare, which runs nothing until it is given one."""

    nodes: int
    procs_per_node: int
    pod_ip: str
    rdzv_host: str
    rdzv_port: int
    status_port: int
    shared: Path
    run_dir: Path
    termination_log: Path
    shutdown_seconds: float = SHUTDOWN_SECONDS
    """From SIGTERM to the moment when everything is killed; the pod's grace period must be longer."""

    stall_min_seconds: float = 30.0
    stall_max_seconds: float = 1800.0
    """A rank that trains may be silent for ten times its own p99 step time, bounded by these two."""

    assignment_dir: Path | None = None
    """The folder with attempt, node rank and nodes, if they may change while the pod runs."""

    reassign_seconds: float = 300.0
    """How long a pod whose ranks lost a peer waits for its place in the next attempt."""

    code: SubmittedCode | None = None
    """None where the code is in the image or on the volume already."""

    live: bool = False
    """The ranks agree among each other on who takes part: no torchrun spans pods."""

    site_packages: Path | None = None
    """The folder of the packages that the code requires; it is known once they are installed."""

    name: str | None = None
    """Of the pod, which a pod that gets another place keeps; None where nothing says it."""

    keeps_output: bool = False
    """Whether the launcher copies what the pod prints to the volume. `ddpjob run` does so itself."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.procs_per_node

    def placed(self, place: Assignment) -> PodEnvironment:
        """The same pod in another place of the gang, or another gang."""
        return replace(self, attempt=place.attempt, node_rank=place.node_rank, nodes=place.nodes)

    @property
    def log_dir(self) -> Path:
        """On the volume, where people look after the pod is gone."""
        return self.shared / "logs" / self.job

    @property
    def output_log(self) -> Path | None:
        """Where what the pod prints in its place is kept; None for a spare, and without a name."""
        if self.name is None or self.node_rank is None:
            return None
        return log_file(self.log_dir, self.name, self.attempt, self.node_rank)


@dataclass(frozen=True, slots=True)
class AgentEnvironment:
    """Of torchrun's agent, which the launcher starts and must not outlive."""

    run_dir: Path
    launcher_pid: int
    shutdown_seconds: float = SHUTDOWN_SECONDS


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This rank among all, as torchrun numbers them; the only rank without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    under_torchrun: bool = False
    keeps_store: bool = False
    """torchrun keeps the ranks' store over restarts of its own; the launcher's torchrun has none."""

    max_restarts: int = 0
    """Of torchrun itself."""

    run_dir: Path | None = None
    """None without a launcher."""

    agent_pid: int | None = None
    """torchrun's agent, where the launcher started it."""

    scratch: Path | None = None
    """What ends with the pod; None without the operator, and for a working directory that is to be kept."""

    observe_script: bool = True
    """Report the progress of a script that does not report itself (`spec.observeScript`)."""

    shutdown_seconds: float = SHUTDOWN_SECONDS
    """How long a rank that failed may be at work before it ends."""


@dataclass(frozen=True, slots=True)
class LivePlace:
    """The place of a rank in a gang whose ranks recover live. torchrun knows those of this node only."""

    node_rank: int
    local_rank: int
    ranks: int
    """Of the whole gang."""

    procs_per_node: int
    host: str
    """The address at which the others reach this pod."""

    @property
    def rank(self) -> int:
        """As long as no node is missing."""
        return self.node_rank * self.procs_per_node + self.local_rank


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """The job and attempt that a rank belongs to, and where its files are.

    Without the operator, under plain torchrun, each start is a new run of a job with files in ./shared.
    """

    name: str
    uid: str
    created: int
    """The job's creation time in epoch seconds."""

    attempt: int
    nodes: int
    shared: Path
    snapshot_every: str
    snapshot_keep: int
    snapshot_keep_every: int | None = None
    """Steps; None where only the newest are kept."""

    snapshot_resume: str = "Any"
    """One of SNAPSHOT_RESUME."""

    non_finite_loss: str = "Warn"
    """One of NON_FINITE_LOSS."""

    elastic_min_nodes: int | None = None
    """The number of nodes may change between attempts, down to this one; None where it does not."""

    code_sha256: str | None = None
    """Digest of the submitted code; None without."""

    live: LivePlace | None = None
    """Where ranks recover live: the place of this one."""

    @property
    def log_dir(self) -> Path:
        """`logs/<job>` on the volume (docs/contracts.md section 6)."""
        return self.shared / "logs" / self.name


def parse_target(argv: Sequence[str]) -> Target:
    """`--module NAME -- ARG…` or `--script PATH -- ARG…`; raises UserError for anything else."""
    if len(argv) < 2 or argv[0] not in ("--module", "--script") or not argv[1]:
        raise UserError(f"the launcher was started with {list(argv)}; usage: {USAGE}")
    rest = list(argv[2:])
    if rest and rest[0] != "--":
        raise UserError(f"the launcher does not know {rest[0]!r}; put -- before the script's own arguments")
    return Target(kind=argv[0].removeprefix("--"), name=argv[1], args=tuple(rest[1:]))


def parse_pod(env: Mapping[str, str], place: Assignment | None = None) -> PodEnvironment:
    """Read and check every variable; raises UserError that names all of the bad ones, each with what it must be.

    `place` takes the place of the variables that name one.
    """
    reader = _Reader(env)
    attempt, node_rank, nodes = (place.attempt, place.node_rank, place.nodes) if place else reader.place()
    parsed = PodEnvironment(
        job=reader.text("DDPJOB_NAME"),
        namespace=reader.text("DDPJOB_NAMESPACE"),
        uid=reader.text("DDPJOB_UID"),
        attempt=attempt,
        node_rank=node_rank,
        nodes=nodes,
        procs_per_node=reader.integer("DDPJOB_PROCS_PER_NODE", 1, 1024),
        pod_ip=reader.text("POD_IP"),
        rdzv_host=reader.text("DDPJOB_RDZV_HOST"),
        rdzv_port=reader.integer("DDPJOB_RDZV_PORT", 1, 65535),
        status_port=reader.integer("DDPJOB_STATUS_PORT", 0, 65535),
        shared=reader.path("DDPJOB_SHARED"),
        run_dir=reader.path("DDPJOB_RUN_DIR"),
        termination_log=reader.path("DDPJOB_TERMINATION_LOG"),
        shutdown_seconds=reader.seconds("DDPJOB_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS),
        stall_min_seconds=reader.seconds("DDPJOB_STALL_MIN_SECONDS", 30.0),
        stall_max_seconds=reader.seconds("DDPJOB_STALL_MAX_SECONDS", 1800.0),
        assignment_dir=reader.path("DDPJOB_ASSIGNMENT_DIR") if env.get("DDPJOB_ASSIGNMENT_DIR") else None,
        reassign_seconds=reader.seconds("DDPJOB_REASSIGN_SECONDS", 300.0),
        code=reader.code(),
        live=env.get("DDPJOB_LIVE") == "true",
        name=env.get("DDPJOB_POD_NAME") or None,
        keeps_output=env.get("DDPJOB_KEEP_OUTPUT") == "true",
    )
    if parsed.stall_min_seconds > parsed.stall_max_seconds:
        reader.problems.append("DDPJOB_STALL_MIN_SECONDS is greater than DDPJOB_STALL_MAX_SECONDS")
    reader.check()
    return parsed


def parse_agent(env: Mapping[str, str]) -> AgentEnvironment:
    """The environment of torchrun's agent. Raises UserError."""
    reader = _Reader(env)
    parsed = AgentEnvironment(
        reader.path("DDPJOB_RUN_DIR"),
        reader.integer("DDPJOB_LAUNCHER_PID", 1, MAX_PID),
        reader.seconds("DDPJOB_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS),
    )
    reader.check()
    return parsed


def first_live_rank(env: Mapping[str, str]) -> int:
    """What the number of a rank that recovers live is ahead of the one that torchrun, which knows one node, gives it.

    Of a place: the environment of a pod that waits for one names none. Raises UserError.
    """
    reader = _Reader(env)
    place = reader.live_place()
    reader.check()
    return 0 if place is None else place.rank


def parse_rank(env: Mapping[str, str]) -> RankEnvironment:
    """The variables that torchrun and the launcher set for each rank. Raises UserError."""
    reader = _Reader(env)
    world_size = reader.integer("WORLD_SIZE", 1, MAX_RANKS, default=1)
    local_world_size = reader.integer("LOCAL_WORLD_SIZE", 1, MAX_RANKS, default=1)
    parsed = RankEnvironment(
        rank=reader.integer("RANK", 0, world_size - 1, default=0),
        world_size=world_size,
        local_rank=reader.integer("LOCAL_RANK", 0, MAX_RANKS - 1, default=0),
        local_world_size=local_world_size,
        under_torchrun="RANK" in env,
        max_restarts=reader.integer("TORCHELASTIC_MAX_RESTARTS", 0, MAX_ATTEMPT, default=0),
        keeps_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not env.get("DDPJOB_AGENT_PID"),
        run_dir=Path(env["DDPJOB_RUN_DIR"]) if env.get("DDPJOB_RUN_DIR") else None,
        agent_pid=reader.integer("DDPJOB_AGENT_PID", 1, MAX_PID) if env.get("DDPJOB_AGENT_PID") else None,
        scratch=Path(env["DDPJOB_SCRATCH"]) if env.get("DDPJOB_SCRATCH") else None,
        observe_script=env.get("DDPJOB_OBSERVE_SCRIPT") != "false",
        shutdown_seconds=reader.seconds("DDPJOB_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS),
    )
    reader.check()
    return parsed


def rank_variables(rank: int, size: int) -> dict[str, str]:
    """The variables of rank `rank` of `size`, all on this node."""
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in places.items()}


def number_live_rank(env: MutableMapping[str, str]) -> None:
    """Give a rank whose gang recovers live its number in the gang: torchrun, which knows one node, gives that of the
    node. Raises UserError.
    """
    reader = _Reader(env)
    place = reader.live_place()
    reader.check()
    if place is not None:
        env.update(RANK=str(place.rank), WORLD_SIZE=str(place.ranks))


def parse_job(env: Mapping[str, str], *, default_name: str) -> JobEnvironment:
    """The job of this rank; what the operator has not set gets the values of a run without it. Raises UserError."""
    reader = _Reader(env)
    parsed = JobEnvironment(
        name=env.get("DDPJOB_NAME") or re.sub(r"[^a-z0-9]+", "-", default_name.lower()).strip("-") or "training",
        uid=env.get("DDPJOB_UID") or "local",
        created=reader.integer("DDPJOB_CREATED", 0, MAX_CREATED, default=int(time.time())),
        attempt=reader.attempt(default=0),
        nodes=reader.integer("DDPJOB_NODES", 1, MAX_NODES, default=1),
        shared=Path(env.get("DDPJOB_SHARED") or "shared").absolute(),
        snapshot_every=env.get("DDPJOB_SNAPSHOT_EVERY") or "100steps",
        snapshot_keep=reader.integer("DDPJOB_SNAPSHOT_KEEP", 1, MAX_KEEP, default=3),
        snapshot_keep_every=reader.integer("DDPJOB_SNAPSHOT_KEEP_EVERY", 1, MAX_STEPS, default=0) or None,
        snapshot_resume=reader.choice("DDPJOB_SNAPSHOT_RESUME", SNAPSHOT_RESUME),
        non_finite_loss=reader.choice("DDPJOB_NON_FINITE_LOSS", NON_FINITE_LOSS),
        elastic_min_nodes=reader.integer("DDPJOB_ELASTIC_MIN_NODES", 1, MAX_NODES, default=0) or None,
        code_sha256=code.sha256 if (code := reader.code()) is not None else None,
        live=reader.live_place(),
    )
    reader.check()
    return parsed


class _Reader:
    """Reads variables and collects what is wrong with them, so that one look at the message fixes all."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.problems: list[str] = []

    def check(self) -> None:
        """Raise UserError with all problems."""
        if self.problems:
            raise UserError("; ".join(self.problems))

    def text(self, name: str) -> str:
        value = self._env.get(name, "")
        if not value:
            self.problems.append(f"{name} is not set: start the pod by a DDPJob or `ddpjob run`, or set it")
        return value

    def place(self) -> tuple[int, int, int]:
        """Attempt, node rank and nodes."""
        nodes = self.integer("DDPJOB_NODES", 1, MAX_NODES)
        return self.attempt(), self.integer("DDPJOB_NODE_RANK", 0, nodes - 1), nodes

    def live_place(self) -> LivePlace | None:
        if self._env.get("DDPJOB_LIVE") != "true":
            return None
        procs, (_, node_rank, nodes) = self.integer("DDPJOB_PROCS_PER_NODE", 1, 1024), self.place()
        local_rank = self.integer("LOCAL_RANK", 0, procs - 1, default=0)
        return LivePlace(node_rank, local_rank, nodes * procs, procs, self.text("POD_IP"))

    def attempt(self, default: int | None = None) -> int:
        return self.integer("DDPJOB_ATTEMPT", 0, MAX_ATTEMPT, default=default)

    def path(self, name: str) -> Path:
        value = self.text(name)
        if value and not value.startswith("/"):
            self.problems.append(f"{name}={value!r} must be an absolute path")
        return Path(value)

    def code(self) -> SubmittedCode | None:
        if not self._env.get("DDPJOB_CODE_DIR"):
            return None
        archives, sha256 = self.path("DDPJOB_CODE_DIR"), self.text("DDPJOB_CODE_SHA256")
        if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
            self.problems.append(f"DDPJOB_CODE_SHA256={sha256!r} must be 64 lower-case hexadecimal digits")
        requirements = self._env.get("DDPJOB_CODE_REQUIREMENTS") or None
        if requirements is not None and (requirements.startswith("/") or ".." in requirements.split("/")):
            self.problems.append(f"DDPJOB_CODE_REQUIREMENTS={requirements!r} must be a path below the submitted folder")
        return SubmittedCode(archives, sha256, requirements)

    def integer(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        if default is not None and not self._env.get(name):
            return default
        text = self.text(name)
        if not text:
            return low
        value = int(text) if text.isascii() and text.isdecimal() else None
        if value is None or not low <= value <= high:
            self.problems.append(f"{name}={text!r} must be a whole number from {low} to {high}")
            return low
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self._env.get(name) or choices[0]
        if value not in choices:
            self.problems.append(f"{name}={value!r} must be one of {', '.join(choices)}")
        return value

    def seconds(self, name: str, default: float) -> float:
        text = self._env.get(name, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < 1e9:
            self.problems.append(f"{name}={text!r} must be a number of seconds above 0")
            return default
        return value
