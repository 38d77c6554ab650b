"""What this machine has, and what it lacks to run a given job: found out before the first process starts."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from ddpjob_operator.api.spec import BUILT_IN_MODULE, DDPJobSpec
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH, Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.manifests.shared import source_claim
from ddpjob_operator.core.values.job import Bounds, Defaults, Job, Manifest, PodSecurity
from ddpjob_operator.core.values.observed import ServiceView
from ddpjob_operator.local.environment import (
    Endpoints,
    Machine,
    NotOnThisMachine,
    build_command,
    kept_back,
    left_out,
    on_volume,
)
from ddpjob_operator.local.initializer import initializer_containers
from ddpjob_operator.local.network import LOOPBACK
from ddpjob_operator.local.script_paths import written_in

_NEEDED = ("torch", "ddp_trainer")
_LONGEST_COMMAND = 200
_PLAIN_PATH = re.compile(r"[\w@%+=:,./-]+")
"""One that means itself in a shell, as in shlex.quote, also with letters beyond ASCII."""
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")
_INSTALL = "install ddpjob[cli,trainer], as `pip install '.[cli,trainer]'` in a checkout does"
CGROUP = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def this_machine(shared: Path) -> Machine:
    """This machine, with `shared` in the place of the volume."""
    rocm = _is_torch_for_amd()
    return Machine(
        host=socket.gethostname(),
        shared=shared,
        environ=dict(os.environ),
        cores=_cores(),
        gpus=_gpus_of_amd() if rocm else _gpus(),
        rocm=rocm,
    )


def missing_here(job: Job, machine: Machine) -> tuple[str, ...]:
    """Why the job cannot run here, one sentence each with what to do; empty if it can."""
    return tuple(_missing(job, machine))


def different_here(job: Job, machine: Machine) -> tuple[str, ...]:
    """What a person should know of how this run differs from the same job in a cluster."""
    pod = _first_pod(job)
    notes = list(left_out(pod))
    for item in job.spec.initializers:
        if item.script is not None:
            first, *more = item.script.strip().splitlines() or [""]
            length = f" … ({1 + len(more)} lines)" if more else ""
            notes.append(f"initializer {item.name} runs a shell script on this machine, as you: {first}{length}")
    if names := kept_back(pod, machine):
        notes.append(f"not passed on from this shell: {', '.join(names)}; --env {names[0]} passes one on")
    if job.spec.suspend:
        notes.append("spec.suspend is for a cluster: a run that somebody starts by hand is meant to run")
    ranks = seats(job.spec) * job.spec.ranks_per_node
    if machine.gpus and len(machine.gpus) < ranks:
        notes.append(f"{len(machine.gpus)} GPU(s) for {ranks} ranks: training runs on the CPU")
    elif job.spec.gpus_per_node and not machine.gpus:
        notes.append("this machine has no GPU for the ranks: training runs on the CPU")
    elif len(machine.gpus) < (asked := seats(job.spec) * job.spec.gpus_per_node):
        notes.append(f"{len(machine.gpus)} GPU(s) where the job asks for {asked}: a pod gets fewer than it would have")
    return tuple(notes)


def program_in_words(job: Job) -> str:
    """The command line of a rank, in one line; torchrun starts it."""
    entrypoint = job.spec.entrypoint
    program = [entrypoint.script] if entrypoint.script else ["-m", entrypoint.module or BUILT_IN_MODULE]
    command = shlex.join(["python", *program, *job.spec.args])
    words = "".join(character for character in command if character.isprintable())
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}…"


def as_run_here(job: Job) -> Job:
    """The job without suspend and ttlSecondsAfterFinished, which make no sense here."""
    return replace(job, spec=job.spec.model_copy(update={"suspend": False, "ttl_seconds_after_finished": None}))


def _missing(job: Job, machine: Machine) -> Iterator[str]:
    if sys.platform != "linux":
        yield f"ddpjob run needs Linux, and this is {sys.platform}; run it in a Linux container or virtual machine"
        return
    if job.spec.code is not None and machine.code is None:
        yield (
            "spec.code: the code is in a cluster; get it with `ddpjob code`, and write code: {path: FOLDER} "
            "in place of configMaps and sha256"
        )
        return
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        yield f"{' and '.join(absent)}: not installed for {sys.executable}; {_INSTALL}"
    script = job.spec.entrypoint.script
    if script is not None and not job.spec.initializers:  # which may put it there
        here = (machine.code.folder if machine.code else Path()) / on_volume(script, machine.shared)
        if not here.is_file():
            yield (
                f"spec.entrypoint.script: {script} would be {here} on this machine, and there is no such file; "
                f"put the script there, for example below {machine.shared}, which stands for /mnt/shared"
            )
        elif found := written_in(here, Path(SHARED_PATH), machine.shared):
            line, path = found
            yield (
                f"spec.entrypoint.script: line {line} of {script} names {path}, and on this machine {machine.shared} "
                f"stands for {SHARED_PATH}: write os.environ['DDPJOB_SHARED'] for it, which is right on a cluster too, "
                f"or make a link: sudo ln -sfn {machine.shared} {SHARED_PATH}"
            )
    try:
        build_command(_first_pod(job), machine, Endpoints(0, 0, Path()), own=own_variables(job))
    except NotOnThisMachine as refusal:
        yield from refusal.problems
    yield from _missing_data(job, machine)


def _missing_data(job: Job, machine: Machine) -> Iterator[str]:
    for item in job.spec.initializers:
        if (claim := source_claim(item)) is not None:
            yield (
                f"spec.initializers {item.name}: the claim {claim} is in a cluster, and there is none here; "
                f"put a copy at {machine.shared / item.path} and remove the initializer"
            )
        if item.script is not None and _is_taken_apart(item.script, machine.shared):
            yield (
                f"spec.initializers {item.name}: its script names {SHARED_PATH}, for which {machine.shared} stands, "
                'and a shell would take it apart: write "$DDPJOB_SHARED" for it, with its quotes, as is right on '
                "a cluster too, or choose a --shared folder without blanks and special characters"
            )
    if job.spec.initializers:
        pod = build_initializer(_admitted(job), 0)
        for container in initializer_containers(pod):
            try:
                build_command(pod, machine, Endpoints(0, 0, Path()), container=container)
            except NotOnThisMachine as refusal:
                yield from (f"spec.initializers {container['name']}: {problem}" for problem in refusal.problems)


def _is_taken_apart(script: str, shared: Path) -> bool:
    """Whether the path that takes the place of the volume's in a shell script may be more than a part of one word: the
    script could then delete files outside of the folder.
    """
    return on_volume(script, shared) != script and _PLAIN_PATH.fullmatch(str(shared)) is None


def seats(spec: DDPJobSpec) -> int:
    """How many pods of a job live here at the same time: spares hold GPUs as well."""
    return spec.nodes + spec.spares


def own_variables(job: Job) -> frozenset[str]:
    """Names in `spec.env`: what the user set wins over what suits this machine."""
    return frozenset(variable.name for variable in job.spec.env)


def _first_pod(job: Job) -> Manifest:
    return build_pod(_admitted(job), Place(0, 0, ServiceView(LOOPBACK, 0)))


def _admitted(job: Job) -> Admitted:
    """There is no administrator here, so nothing is beyond a bound."""
    admitted = admit(job, Defaults(bounds=Bounds(pod_security=PodSecurity.PRIVILEGED)))
    assert isinstance(admitted, Admitted), admitted.problems
    return admitted


def _cores() -> int:
    """Those that this process may use: in a container its quota, rounded up, as the launcher counts them in a pod.
    macOS, on which the run is refused, does not say which these are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def _quota() -> float | None:
    """CPUs that the control group grants: `cpu.max` in version 2, two files in version 1; None without a limit."""
    try:
        if (CGROUP / "cpu.max").exists():
            quota, period = (CGROUP / "cpu.max").read_text().split()
        else:
            quota, period = ((CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cpus = int(quota) / int(period)
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return cpus if cpus > 0 else None  # version 1 says -1 for no limit


def _gpus() -> tuple[str, ...]:
    """Those that CUDA would number here: what CUDA_VISIBLE_DEVICES leaves, else one for each device file. CUDA ends the
    list at the first entry that names no device, such as -1.
    """
    chosen = _chosen("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return chosen
    devices = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(str(index) for index in range(len(devices) or _gpus_of_windows()))


def _chosen(variable: str) -> tuple[str, ...] | None:
    """What this variable leaves, in its order; None if it is not set."""
    value = os.environ.get(variable)
    if value is None:
        return None
    return tuple(takewhile(_DEVICE.fullmatch, (part.strip() for part in value.split(","))))


def _gpus_of_amd() -> tuple[str, ...]:
    """Those that HIP would number here: it numbers anew those that ROCR_VISIBLE_DEVICES leaves."""
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if (chosen := _chosen(variable)) is not None:
            return chosen
    left = _chosen("ROCR_VISIBLE_DEVICES")
    return tuple(str(index) for index in range(_devices_of_amd() if left is None else len(left)))


def _devices_of_amd() -> int:
    """GPUs in the kernel's list whose device files are here: a container has the list of the whole machine."""
    if not (DEVICES / "kfd").exists():
        return 0
    count = 0
    for node in AMD_NODES.glob("*/properties"):
        try:
            found = re.search(r"^drm_render_minor (\d+)$", node.read_text(), re.MULTILINE)
        except OSError:  # of a GPU that the control group of the container withholds
            continue
        count += found is not None and (DEVICES / "dri" / f"renderD{found[1]}").exists()
    return count


def _is_torch_for_amd() -> bool:
    """Whether the torch that is installed is: by its file, as importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        version = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^hip\b.*=\s*['\"]", version, re.MULTILINE) is not None


def _gpus_of_windows() -> int:
    """In WSL 2 one device file stands for all GPUs: those that NVIDIA's library counts."""
    if not (DEVICES / "dxg").exists():
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # Windows has no driver of NVIDIA's
        return 0
    count = ctypes.c_uint()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return 0 if failed else count.value
