"""From a pod's manifest to the command and environment of a process on this machine.

The manifest is the one that the cluster would get. What cannot be the same here is replaced: the volume's mount
path by a folder, the pod's own ports and scratch by free ones (docs/contracts.md section 2), the downward API by
what is true of this machine. What only a cluster has, such as a Secret, is refused with the way out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob_operator.core.manifests.pod_environment import SHARED_PATH
from ddpjob_operator.core.values.job import Manifest
from ddpjob_operator.core.values.names import TRAINER_CONTAINER
from ddpjob_operator.local.expansion import expand

_OF_AN_OUTER_RUN = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(TORCHELASTIC|DDPJOB|PET)_.*"
)
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TEMP|TMP|LANG|LANGUAGE|LC_.*|XDG_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_(LIBRARY_PATH|PRELOAD)|CC|CXX|CPATH|LIBRARY_PATH|(C|CXX|LD)FLAGS"
    r"|(?i:https?_proxy|no_proxy|all_proxy)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|(OMP|KMP|MKL|GOMP|OPENBLAS|NUMEXPR|MALLOC|NCCL|GLOO|UCX|FI|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON"
    r"|CUDA|CUBLAS|CUDNN|NVIDIA|NVTE|ROCM|ROCR|HIP|HSA|HF|TRANSFORMERS|TOKENIZERS|DIFFUSERS|ACCELERATE)_.*"
)
"""What a process has of the shell's environment beside the variables that the job names: programs, caches, and how the
libraries of training are set, but no keys. The job file may be somebody else's, and a pod has none of them either."""
_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_OFTEN_MEANT = re.compile(r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|(WANDB|MLFLOW|COMET|NEPTUNE|AWS|AZURE|GOOGLE)_.*")
_OF_PIP = re.compile(r"PIP_((EXTRA_)?INDEX_URL|FIND_LINKS|NO_INDEX|TRUSTED_HOST|CERT|PROXY|CONFIG_FILE)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_AT_MOUNT_PATH = re.compile(rf"(?<![\w./~)}}]){re.escape(SHARED_PATH)}(?![\w.-])")
"""Where a path begins with it: alone, after = or a comma, in the quotes of JSON, in a line of a shell script, which may
have it as ${A:-/mnt/shared}.
"""


class NotOnThisMachine(ValueError):
    """A pod asks for what only a cluster can give. `problems` has one message each: field, cause, fix."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class MountedCode:
    """Submitted code, as far as a pod and a person see it."""

    parts: Path
    """The directory with the parts, which a pod mounts in a cluster."""
    folder: Path
    """The folder that was packed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a pod of one run may know of the machine it runs on."""

    host: str
    shared: Path
    environ: Mapping[str, str]
    """The environment of `ddpjob run`. What is passed on of it takes the place of what an image would set."""

    cores: int
    gpus: tuple[str, ...] = ()
    """Indices or UUIDs of the GPUs that the run may use."""
    rocm: bool = False
    """Whether torch is built for AMD's GPUs."""

    code: MountedCode | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where one pod of one attempt listens, and where its scratch is."""

    rendezvous_port: int
    status_port: int
    scratch: Path

    @property
    def termination_log(self) -> Path:
        return self.scratch / "termination-log"

    @property
    def assignment_dir(self) -> Path:
        return self.scratch / "assignment"

    @property
    def run_dir(self) -> Path:
        return self.scratch / "run"


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute: an argv and its whole environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def build_command(
    manifest: Manifest,
    machine: Machine,
    endpoints: Endpoints,
    *,
    own: frozenset[str] = frozenset(),
    gpus: tuple[str, ...] = (),
    container: Manifest | None = None,
) -> Command:
    """The trainer container of `manifest`, or another one of its containers, as a command for this machine, with `gpus`
    for its ranks. `own` names the variables of `spec.env`.

    Raises:
        NotOnThisMachine: if a variable comes from a Secret, a ConfigMap or the kubelet, and the shell does not
        set it either.
    """
    if container is None:
        container = trainer_container(manifest)
        local = _overrides(container, machine, endpoints, own, gpus)
    else:
        local = _everywhere(machine, endpoints)
    env = {name: value for name, value in machine.environ.items() if _is_passed_on(name)} | local
    defined: dict[str, str] = {}
    problems: list[str] = []
    for variable in container.get("env") or ():
        name = variable["name"]
        if name == "HOME" and name not in own:
            if name not in env:
                continue  # what needs it finds the home of this user without; below an empty one it finds the root
            value = env[name]
        elif name in local:
            value = env[name]
        elif "valueFrom" in variable:
            try:
                found = _value_from(variable, manifest, machine)
            except NotOnThisMachine as refusal:
                problems.extend(refusal.problems)
                continue
            if found is None:
                continue
            value = found
        else:
            value = on_volume(expand(variable.get("value", ""), defined), machine.shared)
        defined[name] = value
    problems.extend(_refuse_env_from(container))
    if problems:
        raise NotOnThisMachine(problems)
    words = (*container.get("command", ()), *container.get("args", ()))
    argv = [on_volume(expand(word, defined), machine.shared) for word in words]
    if argv and argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    return Command(tuple(argv), env | defined)


def trainer_container(manifest: Manifest) -> Manifest:
    """The container that runs the launcher."""
    return next(item for item in manifest["spec"]["containers"] if item["name"] == TRAINER_CONTAINER)


def kept_back(manifest: Manifest, machine: Machine) -> list[str]:
    """Variables of this shell that training scripts often read, or pip where it installs requirements, and that the
    pod does not get: no one names them.
    """
    named = {variable["name"] for variable in trainer_container(manifest).get("env") or ()}
    installs = "DDPJOB_CODE_REQUIREMENTS" in named
    return sorted(
        name
        for name in machine.environ.keys() - named
        if _is_kept_back(name) or (installs and _OF_PIP.fullmatch(name) is not None)
    )


def left_out(manifest: Manifest) -> Iterator[str]:
    """What the pod would have in a cluster and has not here, one sentence each."""
    spec = manifest["spec"]
    for item in spec.get("initContainers") or ():
        yield f"spec.podTemplate.spec.initContainers: {item.get('name')} is not run on this machine"
    for item in spec["containers"]:
        if item["name"] != TRAINER_CONTAINER:
            yield f"spec.podTemplate.spec.containers: {item['name']} is not run on this machine"


def _is_passed_on(name: str) -> bool:
    if _OF_AN_OUTER_RUN.fullmatch(name) or _SECRET.search(name):
        return False
    return _PASSED_ON.fullmatch(name) is not None


def _is_kept_back(name: str) -> bool:
    return _OFTEN_MEANT.fullmatch(name) is not None and not _is_passed_on(name)


def _everywhere(machine: Machine, endpoints: Endpoints) -> dict[str, str]:
    return {"DDPJOB_SHARED": str(machine.shared), "DDPJOB_TERMINATION_LOG": str(endpoints.termination_log)}


def _overrides(
    container: Manifest, machine: Machine, endpoints: Endpoints, own: frozenset[str], gpus: tuple[str, ...]
) -> dict[str, str]:
    given = {item["name"]: item.get("value", "") for item in container.get("env") or ()}
    nodes, ranks = int(given["DDPJOB_NODES"]), int(given["DDPJOB_PROCS_PER_NODE"])
    overrides = _everywhere(machine, endpoints) | {
        "DDPJOB_RUN_DIR": str(endpoints.run_dir),
        "DDPJOB_SCRATCH": str(endpoints.scratch),
        "DDPJOB_KEEP_OUTPUT": "false",  # the runner writes the log of a pod there itself
        "DDPJOB_STATUS_PORT": str(endpoints.status_port),
        "DDPJOB_RDZV_HOST": "127.0.0.1",
        "DDPJOB_RDZV_PORT": str(endpoints.rendezvous_port),
    }
    if "DDPJOB_CODE_DIR" in given and machine.code is not None:
        overrides["DDPJOB_CODE_DIR"] = str(machine.code.parts)
    if "DDPJOB_ASSIGNMENT_DIR" in given:
        overrides["DDPJOB_ASSIGNMENT_DIR"] = str(endpoints.assignment_dir)
    if "OMP_NUM_THREADS" not in own and "OMP_NUM_THREADS" not in machine.environ:
        overrides["OMP_NUM_THREADS"] = str(max(1, machine.cores // (nodes * ranks)))
    if machine.gpus:
        overrides |= _visible(gpus, machine.rocm, own)
    return overrides


def _visible(gpus: tuple[str, ...], rocm: bool, own: frozenset[str]) -> dict[str, str]:
    """The variable by which a pod sees these GPUs alone, unless `spec.env` has one of those that choose them."""
    if not rocm:
        return {} if "CUDA_VISIBLE_DEVICES" in own else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if own & {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}:
        return {}
    return {"HIP_VISIBLE_DEVICES": ",".join(gpus) or "-1"}  # HIP takes an empty one for none, and shows all


def gpus_of_node(gpus: tuple[str, ...], seat: int, seats: int, ranks: int, asked: int = 0) -> tuple[str, ...]:
    """One GPU for each rank of the pod in `seat`, and none for anyone if there are fewer than all `seats` need: NCCL
    refuses two ranks on one GPU. A pod that has `asked` for more than one a rank gets more, as far as they go round.
    """
    if len(gpus) < seats * ranks:
        return ()
    share = max(ranks, min(asked, len(gpus) // seats))
    return gpus[seat * share : (seat + 1) * share]


def _value_from(variable: Manifest, manifest: Manifest, machine: Machine) -> str | None:
    """None for an optional source that is not there."""
    name, source = variable["name"], variable["valueFrom"]
    if "fieldRef" in source:
        path = source["fieldRef"].get("fieldPath", "")
        value = _field(path, manifest, machine)
        if value is not None:
            return value
        raise NotOnThisMachine([f"spec.env {name}: fieldRef {path} has no value on this machine; give a value instead"])
    if name in machine.environ:
        return machine.environ[name]
    kind = next(iter(source), "valueFrom")
    described = source.get(kind) or {}
    if kind == "resourceFieldRef":
        what = f"resourceFieldRef {described.get('resource', '')} is a limit of a container, and there is none here"
    else:
        holder = described.get("name") or described.get("volumeName", "")  # of a fileKeyRef
        what = f"{kind} {holder}/{described.get('key', '')} needs a cluster, and there is none here"
    if described.get("optional"):
        return None
    raise NotOnThisMachine([f"spec.env {name}: {what}; set {name} in this shell (export {name}=…) and run again"])


def _field(path: str, manifest: Manifest, machine: Machine) -> str | None:
    """The downward API's fieldRef, for a pod that runs on this machine."""
    metadata: dict[str, Any] = manifest["metadata"]
    if subscript := _SUBSCRIPT.fullmatch(path):
        return str((metadata.get(subscript[1]) or {}).get(subscript[2], ""))
    fields = {
        "metadata.name": metadata.get("name"),
        "metadata.namespace": metadata.get("namespace"),
        "metadata.uid": metadata.get("uid"),
        "spec.nodeName": machine.host,
        "spec.serviceAccountName": manifest["spec"].get("serviceAccountName", "default"),
        "status.hostIP": "127.0.0.1",
        "status.podIP": "127.0.0.1",
        "status.podIPs": "127.0.0.1",
    }
    return fields.get(path)


def _refuse_env_from(container: Manifest) -> Iterator[str]:
    for source in container.get("envFrom") or ():
        kind = next((key for key in ("secretRef", "configMapRef") if key in source), "envFrom")
        name = (source.get(kind) or {}).get("name", "")
        yield (
            f"spec.podTemplate.spec.containers[trainer].envFrom: {kind} {name} needs a cluster, and there is none; "
            "list its variables under spec.env and set them in this shell"
        )


def on_volume(text: str, shared: Path) -> str:
    """`text` with the volume's mount path as the folder that takes its place."""
    return _AT_MOUNT_PATH.sub(lambda _: str(shared), text)
