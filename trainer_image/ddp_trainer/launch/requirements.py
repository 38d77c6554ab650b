"""Packages that the submitted code requires: one environment on the volume for each set of them, `envs/<key>/`.

The launcher of node rank 0 makes it with pip before its ranks start, the others wait for it, and later attempts and
jobs with the same requirements find it. What the image has is not installed again, and torch, whose builds differ in
more than their version, stays the image's.

Only the `site-packages` of the environment are used, through PYTHONPATH. It is made under another name and renamed,
which its scripts in `bin` would not survive, nor would `.pth` files have an effect.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO, Final, NamedTuple

from ddp_trainer.contract import processes
from ddp_trainer.contract.environment import PodEnvironment
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.contract.messages import no_space
from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, put_in_place, remove, remove_leftovers, sync
from ddp_trainer.launch.pip_output import (
    IndexFails,
    NotInstalled,
    PipKilled,
    answer_of_index,
    pip_errors,
    refusal,
    signal_of,
    without_secrets,
)
from ddp_trainer.launch.unused import ENVIRONMENT, PACKAGES, mark_used, remove_unused_aside

POLL_SECONDS: Final = 0.5
SAY_SECONDS: Final = 30.0
RELAY_SECONDS: Final = 5.0
"""How long a process that pip has left may keep its output open."""
MARKER: Final = "ddpjob.json"
FIRST_NODE: Final = "first-node.json"
"""In `work/.<job>`: which environment node rank 0 of an attempt has, or makes."""
VERSION: Final = 1

_PINNED: Final = ("torch", "numpy")
"""Packages of the image that are never replaced: the others of the image are built for these."""
_KEPT_LINES: Final = 200
_SATISFIED: Final = "Requirement already satisfied:"
"""What pip says of each package of the image, with its whole ancestry: a screen of it for a few requirements."""
_OTHER_FILE: Final = re.compile(
    r"(?:-r|--requirement|-c|--constraint)[\s=]*(?P<quote>[\"']?)(?P<path>\S.*?)(?P=quote)(?:\s|$)"
)
_SHORT_OPTION: Final = re.compile(r"^\s*-[ef](?=[^\s-])")
"""One that its path follows without a blank."""

Pause = Callable[[float], bool]
"""Waits so many seconds; False if there is no point in going on."""


class Interrupted(Exception):
    """SIGTERM came, or a later attempt began."""


class AnotherEnvironment(NotInstalled):
    """Node rank 0 makes another one than this node needs. In the next attempt, the images or the nodes may be alike."""

    reason = "WorkerException"


class Source(NamedTuple):
    """What is to be installed: all requirements files by path, and whether they name other things in the folder."""

    files: Mapping[str, str]
    uses_folder: bool


def packages(pod: PodEnvironment, pause: Pause) -> Path | None:
    """The folder with the packages that the code of `pod` requires; None if it requires none.

    Raises UserError for what cannot be installed, OSError for the volume, NotInstalled where the next attempt may
    install it, and Interrupted where `pause` says so.
    """
    if pod.code is None or pod.code.requirements is None:
        return None
    tree, path = pod.shared / "code" / pod.code.sha256, pod.code.requirements
    source = read_requirements(tree, path)
    pins = {name: version for name in _PINNED if (version := _version(name)) is not None}
    env = pod.shared / "envs" / environment_key(source, pod.code.sha256, image_packages(sys.path[1:]))
    note_for_others(pod, env)
    mark_used(env)
    if is_ready(env):
        log(f"{path}: installed already, envs/{env.name}")
    elif pod.node_rank == 0:
        _install(env, tree, pod.shared / "work" / pod.job, path, pins, pause)
    else:
        _await(env, path, pod, pause)
    _record(pod.shared / "work" / f".{pod.job}" / PACKAGES, env)
    return site_packages(env)


def note_for_others(pod: PodEnvironment, path: Path) -> None:
    """Where `pod` is node rank 0, note that it has, or makes, the environment at or around `path` in this attempt."""
    if pod.node_rank == 0:
        key = path.relative_to(pod.shared / "envs").parts[0]
        with contextlib.suppress(OSError):  # the others then wait, whatever they need
            chosen = {"uid": pod.uid, "attempt": pod.attempt, "key": key}
            write_json(pod.shared / "work" / f".{pod.job}" / FIRST_NODE, chosen)


def read_requirements(tree: Path, path: str) -> Source:
    """The requirements file at `path` below the folder `tree`, with those that it includes. Raises UserError."""
    files: dict[str, str] = {}
    queue, uses_folder = [path], False
    while queue:
        name = queue.pop()
        file = tree / name
        if name in files or not _exists(file) or not file.is_file():
            continue
        if not file.resolve().is_relative_to(tree.resolve()):
            continue
        try:
            files[name] = file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{name} of the submitted code is not UTF-8 ({error}); save it as UTF-8") from error
        for line in files[name].splitlines():
            if included := _OTHER_FILE.match(line.strip()):
                queue.append(os.path.normpath(Path(name).parent / included["path"]))
            else:
                uses_folder |= any(_is_there(tree, Path(name).parent, word) for word in _words(line))
    if path not in files:
        raise UserError(f"the submitted code has no {path}, which spec.code.requirements names; add or correct it")
    return Source(files, uses_folder)


def environment_key(source: Source, code_sha256: str, image: Collection[str]) -> str:
    """Equal for environments that can stand for each other. `image` are the packages of the image."""
    python = (
        platform.python_implementation(),
        platform.python_version(),
        sysconfig.get_platform(),
        *platform.libc_ver(),
    )
    facts = [sorted(source.files.items()), code_sha256 if source.uses_folder else None, python, sorted(image)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def image_packages(path: Sequence[str]) -> set[str]:
    """Names and versions of what is installed in the folders of `path`, without reading more than their names.

    What the image has is not in the environment, so an image that lacks some of it needs another one.
    """
    folders = [Path(entry) for entry in path if Path(entry).is_dir()]
    return {found.name for folder in folders for found in folder.glob("*.*-info")}


def is_ready(env: Path) -> bool:
    """Whether it is made, and whole: its marker can be read. Raises OSError."""
    try:
        # A client of NFS remembers for up to a minute that a name does not exist, unless it lists the folder.
        listed = any(entry.name == env.name for entry in env.parent.iterdir())
    except FileNotFoundError:
        return False
    try:
        return listed and isinstance(json.loads((env / MARKER).read_bytes()), dict)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def site_packages(env: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(env)}))


def pip_command(python: Path) -> list[str]:
    """pip for the environment of `python`, as far as its options: the image's, or the one that comes with Python.

    Raises UserError if there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        # -P: a `queue.py` in the working directory is not for pip
        return [sys.executable, "-P", "-m", "pip", "--python", str(python)]
    ensurepip = importlib.util.find_spec("ensurepip")
    folders = [Path(ensurepip.origin).parent / "_bundled"] if ensurepip is not None and ensurepip.origin else []
    if found := sysconfig.get_config_var("WHEEL_PKG_DIR"):
        folders.append(Path(found))
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))]
    if not wheels:
        raise UserError(
            "this image has no pip, so the requirements of the submitted code cannot be installed; add pip or the "
            "packages to an image of your own, and name it in spec.image"
        )
    return [str(python), str(wheels[0] / "pip")]


def _install(env: Path, tree: Path, work: Path, path: str, pins: Mapping[str, str], pause: Pause) -> None:
    """Install `path` of `tree`, by which the environment is named: the script may have written to the one in `work`.
    Paths in it are relative to `work`, since a package that is built there leaves files beside its own.
    """
    began = time.monotonic()
    env.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(env.parent, time.time())
    part = beside(env)
    try:
        log(f"installing {path} as envs/{env.name}")
        python = _make_environment(part)
        constraints = part / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip_log = part / "pip.log"
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--log", str(pip_log)]
        command = [*pip_command(python), "install", *options, "-c", str(constraints), "-r", str(tree / path)]
        oom_kills = processes.oom_kills()
        code, lines = _run(command, work, f"{tree}/", pause)
        for_memory = processes.oom_kills() > oom_kills
        if code != 0 and no_space("\n".join(lines)):
            raise OSError(errno.ENOSPC, f"no space left on device: {pip_errors(lines)}")
        if (by := signal_of(code)) is not None or (code != 0 and for_memory):
            raise PipKilled(path, by, for_memory=for_memory)
        answer = answer_of_index(lines, _lines_of(pip_log)) if code != 0 else None
        if answer is not None and (answer >= 500 or answer == HTTPStatus.TOO_MANY_REQUESTS):
            raise IndexFails(path, answer)
        if code != 0:
            raise UserError(f"{path} cannot be installed: {refusal(lines, answer)}")
        pip_log.unlink(missing_ok=True)
        installed = {
            found.metadata["Name"]: found.version
            for found in importlib.metadata.distributions(path=[str(site_packages(part))])
        }
        write_json(part / MARKER, {"version": VERSION, "time": time.time(), "pinned": pins, "installed": installed})
        sync(part)  # no later attempt looks further than the marker
        put_in_place(part, env, lambda: is_ready(env))
    finally:
        remove(part)
    remove_unused_aside(env.parent.parent)
    count = "1 package" if len(installed) == 1 else f"{len(installed)} packages"
    log(f"installed {count} of {path} in {time.monotonic() - began:.1f} s")


def _lines_of(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()
    except FileNotFoundError:  # pip has failed before it wrote any
        return []


def _make_environment(folder: Path) -> Path:
    """Its Python. It sees the packages of this one, which may itself be of an environment."""
    try:
        import venv
    except ImportError as error:
        raise UserError(
            f"the Python of this image cannot make environments ({error}), so the requirements of the submitted code "
            "cannot be installed; add venv or the packages to an image of your own, and name it in spec.image"
        ) from error
    # Without the system's: those of the Python below an environment would satisfy pip, and ranks do not see them.
    venv.EnvBuilder(symlinks=True).create(folder)
    # Not the standard library, which it has: where pip builds a package, it takes all of this file away.
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
    seen = [entry for entry in sys.path[1:] if Path(entry).is_dir() and entry not in own]
    (site_packages(folder) / "ddpjob-image.pth").write_text("".join(f"{entry}\n" for entry in seen))
    return folder / "bin" / "python"


def _record(record: Path, env: Path) -> None:
    """Keep the environment for as long as the job has no other one, and link it, for a shell."""
    before = (read_json(record) or {}).get("key")
    if before == env.name:
        return
    if isinstance(before, str):
        mark_used(env.parent / before)
    record.parent.mkdir(parents=True, exist_ok=True)
    new = beside(record)
    new.write_text(json.dumps({"key": env.name}))
    new.replace(record)
    link = record.with_name(ENVIRONMENT)
    new = beside(link)
    new.symlink_to(os.path.relpath(env, link.parent))
    new.replace(link)


def _run(command: list[str], folder: Path, tree: str, pause: Pause) -> tuple[int, list[str]]:
    """The exit code, and the last lines of the output. It goes to the log of the pod, without what there is already,
    and with paths below `tree` as their author knows them.
    """
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    relay = threading.Thread(target=_relay, args=(process.stdout, tree, lines), daemon=True)
    relay.start()
    try:
        while process.poll() is None:
            if not pause(POLL_SECONDS):
                raise Interrupted
        relay.join(RELAY_SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, list(lines)


def _relay(stream: IO[str], tree: str, lines: deque[str]) -> None:
    for line in (without_secrets(line).replace(tree, "") for line in stream):
        lines.append(line.rstrip())
        if line.startswith(_SATISFIED):
            continue
        with contextlib.suppress(OSError):  # as for `log`
            sys.stderr.write(line)
            sys.stderr.flush()


def _await(env: Path, path: str, pod: PodEnvironment, pause: Pause) -> None:
    began = said = time.monotonic()
    log(f"waiting for node rank 0 to install {path} as envs/{env.name}")
    while not is_ready(env):
        _refuse_another(env, path, pod)
        if not pause(POLL_SECONDS):
            raise Interrupted
        now = time.monotonic()
        if now - said >= SAY_SECONDS:
            said = now
            log(f"still waiting for node rank 0 to install {path} as envs/{env.name}, for {now - began:.0f} s")


def _refuse_another(env: Path, path: str, pod: PodEnvironment) -> None:
    """Raises AnotherEnvironment if node rank 0 of this attempt has another one: what is waited for never comes.
    With live recovery, another pod may have become node rank 0 in the same attempt.
    """
    chosen = read_json(pod.shared / "work" / f".{pod.job}" / FIRST_NODE) or {}
    is_of_attempt = (chosen.get("uid"), chosen.get("attempt")) == (pod.uid, pod.attempt)
    if pod.live or not is_of_attempt or chosen.get("key") == env.name:
        return
    raise AnotherEnvironment(
        f"node rank 0 has another environment for {path} than this node ({sysconfig.get_platform()}) needs, so their "
        "images or their CPUs differ; name the image by its digest, as a node may have an older one of the same tag, "
        "and where nodes are of several architectures, set placement.topologyKey: kubernetes.io/arch"
    )


def _words(line: str) -> list[str]:
    """What may be a path in a line of a requirements file."""
    plain = _SHORT_OPTION.sub("", re.sub(r"(^|\s)#.*|\[[^]]*\]", "", line))
    return re.split(r"[\s=@;#\"']+", plain.replace("file:", " ").strip())


def _is_there(tree: Path, folder: Path, word: str) -> bool:
    """pip takes some paths as relative to the file that names them, others to the working directory."""
    return word != "" and not word.startswith("-") and any(_exists(place / word) for place in (tree, tree / folder))


def _exists(path: Path) -> bool:
    """What is too long for a name, as a signed URL may be, is none."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _version(name: str) -> str | None:
    """Without importing it, which takes seconds."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
