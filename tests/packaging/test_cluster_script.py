"""The script behind the test cluster: which cluster it chooses, and what it says where there is none."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.ports import free_ports
from tests.support.processes import all_end
from tests.support.tiers import cannot_run, program
from tests.support.waiting import PATIENCE_SECONDS, eventually

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "cluster" / "cluster.sh"
LIB = SCRIPT.parent / "lib"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A machine with nothing cached, nothing running and no Docker that answers."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "DOCKER_HOST": f"unix://{tmp_path}/no-docker.sock",
        "DDPJOB_CACHE_DIR": str(tmp_path / "cache"),
        "DDPJOB_CLUSTER_DIR": str(tmp_path / "cluster"),
    }


def run(
    environment: dict[str, str], *arguments: str, user: int | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        user=user,
        timeout=seconds,
        cwd="/",
    )


def test_a_cluster_of_ones_own_is_used_before_any_other(environment: dict[str, str], tmp_path: Path) -> None:
    mine = tmp_path / "kubeconfig"
    mine.write_text("{}")
    environment["DDPJOB_TEST_KUBECONFIG"] = str(mine)
    assert run(environment, "choose").stdout == "given\n"
    up = run(environment, "up")
    assert (up.returncode, up.stdout) == (0, f"KUBECONFIG={mine}\n")


def test_a_cluster_of_ones_own_that_cannot_be_read_is_an_error_and_no_reason_to_skip(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["DDPJOB_TEST_KUBECONFIG"] = str(tmp_path / "gone")
    done = run(environment, "up")
    assert done.returncode == 1
    assert str(tmp_path / "gone") in done.stderr


def test_nothing_is_loaded_into_a_cluster_of_ones_own(environment: dict[str, str], tmp_path: Path) -> None:
    mine = tmp_path / "kubeconfig"
    mine.write_text("{}")
    environment["DDPJOB_TEST_KUBECONFIG"] = str(mine)
    done = run(environment, "load", "image.tar", "localhost/image:1")
    assert done.returncode == 3
    assert "localhost/image:1" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start the script as somebody else")
@pytest.mark.parametrize("command", ["choose", "up"])
def test_where_no_cluster_is_possible_one_line_says_why(environment: dict[str, str], command: str) -> None:
    if not all(folder.stat().st_mode & 0o005 for folder in SCRIPT.parents):
        pytest.skip(f"nobody but root can read {SCRIPT}")
    environment |= {"HOME": "/", "DDPJOB_CACHE_DIR": "/nowhere", "DDPJOB_CLUSTER_DIR": "/nowhere"}
    done = run(environment, command, user=65534)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("cluster: no cluster here: ")
    assert "root" in done.stderr or "Debian 12" in done.stderr


PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")


def programs_of(folder: Path, version: str, names: tuple[str, ...] = PROGRAMS) -> str:
    """A folder with programs that know their version and nothing else."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho Kubernetes v{version}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_a_folder_that_lacks_a_program_is_an_error_that_names_both(environment: dict[str, str], tmp_path: Path) -> None:
    folder = programs_of(tmp_path / "programs", "1.36.2", ("kube-apiserver", "kube-scheduler", "kubelet"))
    done = run(environment | {"DDPJOB_KUBERNETES_BIN": folder}, "up", "--control-plane-only")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"DDPJOB_KUBERNETES_BIN names {folder}, which has no program kube-controller-manager: put" in done.stderr
    assert not list(tmp_path.glob("cluster*/*"))


def test_a_program_that_cannot_say_its_version_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    folder = programs_of(tmp_path / "programs", "1.36.2")
    Path(folder, "kube-controller-manager").write_text("#!/bin/sh\nexit 126\n")
    done = run(environment | {"DDPJOB_KUBERNETES_BIN": folder}, "up", "--control-plane-only")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{folder}/kube-controller-manager --version" in done.stderr


def test_the_state_of_one_version_is_not_used_by_another(environment: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "cluster-api"
    state.mkdir()
    (state / "version").write_text("1.20.2\n")
    folder = programs_of(tmp_path / "programs", "1.36.2")
    done = run(environment | {"DDPJOB_KUBERNETES_BIN": folder}, "up", "--control-plane-only")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{state} holds a cluster of Kubernetes 1.20.2, and 1.36.2 is asked for" in done.stderr
    assert "'cluster.sh down --control-plane-only'" in done.stderr
    assert sorted(state.iterdir()) == [state / "version"]


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("1.20.2", ["--port=0", "--secure-port=0", "--container-runtime=remote"]),
        ("1.23.17", ["--port=0", "--secure-port=0", "--container-runtime=remote"]),
        ("1.24.0", ["--secure-port=0"]),
        ("1.30.1", ["--secure-port=0"]),
        ("1.31.0-rc.1", ["--secure-port=0", "failCgroupV1: false"]),
        ("1.36.2+k3s1", ["--secure-port=0", "failCgroupV1: false"]),
    ],
)
def test_each_program_gets_the_flags_of_its_version(
    environment: dict[str, str], tmp_path: Path, version: str, flags: list[str]
) -> None:
    folder = programs_of(tmp_path / "programs", version)
    said = programs_script(environment, folder, "no_ports kube-scheduler; container_runtime; cgroup_v1; endpoints")
    assert said.splitlines() == flags


@pytest.mark.parametrize(
    ("server", "proxy", "gates"),
    [
        ("1.20.2", "1.20.2", ""),
        ("1.24.9", "1.20.2", ""),
        ("1.25.0", "1.20.2", "--feature-gates=EndpointSliceProxying=false"),
        ("1.36.2", "1.20.2", "--feature-gates=EndpointSliceProxying=false"),
        ("1.36.2", "1.34.0", ""),
    ],
)
def test_a_proxy_from_the_cache_asks_a_newer_server_for_what_both_know(
    environment: dict[str, str], tmp_path: Path, server: str, proxy: str, gates: str
) -> None:
    folder = programs_of(tmp_path / "programs", server, PROGRAMS[:-1])
    cache = Path(environment["DDPJOB_CACHE_DIR"])
    cache.mkdir()
    programs_of(cache / "kubernetes", proxy, PROGRAMS[-1:])
    assert programs_script(environment, folder, "endpoints").strip() == gates


def programs_script(environment: dict[str, str], folder: str, commands: str) -> str:
    """What functions of lib/programs.sh print once the programs of a folder have given their versions."""
    script = f"""
        set -euo pipefail
        CONTROL_PLANE_ONLY=
        . "{SCRIPT.parent}/lib/settings.sh" && . "{SCRIPT.parent}/lib/build.sh" && . "{SCRIPT.parent}/lib/programs.sh"
        check_given && versions
        {commands.replace("; ", chr(10))}
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment | {"DDPJOB_KUBERNETES_BIN": folder},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_down_where_nothing_runs_is_no_error(environment: dict[str, str]) -> None:
    assert run(environment, "down", "--control-plane-only").returncode == (3 if _missing(environment) else 0)


def _missing(environment: dict[str, str]) -> str:
    """Why no cluster is possible on this machine; empty where one is."""
    return run(environment, "choose", "--control-plane-only").stderr.strip()


def test_status_of_a_cluster_that_does_not_run_is_1(environment: dict[str, str]) -> None:
    if missing := _missing(environment):
        cannot_run("api", missing)
    done = run(environment, "status", "--control-plane-only")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.fixture
def control_plane(environment: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """A control plane of this test's own, with the servers that were built before."""
    for name in ("HOME", "DDPJOB_CACHE_DIR"):
        environment.pop(name)
        if name in os.environ:
            environment[name] = os.environ[name]
    if missing := _missing(environment):
        cannot_run("api", missing)
    environment["DDPJOB_CLUSTER_PORT"] = str(free_ports(3))
    yield environment
    assert run(environment, "down", "--control-plane-only").returncode == 0
    assert not Path(environment["DDPJOB_CLUSTER_DIR"] + "-api").exists()
    assert _processes_of(tmp_path) == set()


@pytest.mark.api_server
def test_up_after_a_crash_starts_what_is_missing_and_nothing_else(control_plane: dict[str, str]) -> None:
    assert up(control_plane).returncode == 0
    before = _daemons(control_plane)
    os.kill(before["apiserver"], signal.SIGKILL)
    all_end([before["apiserver"]])
    assert run(control_plane, "status", "--control-plane-only").returncode == 1
    assert up(control_plane).returncode == 0
    after = _daemons(control_plane)
    assert after.pop("apiserver") != before.pop("apiserver")
    assert after == before


@pytest.mark.api_server
def test_up_after_a_ctrl_c_goes_on_where_it_was(control_plane: dict[str, str]) -> None:
    first = subprocess.Popen(
        ["bash", SCRIPT, "up", "--control-plane-only"],
        env=control_plane,
        stderr=subprocess.DEVNULL,
        process_group=0,
        # a shell cannot catch what was ignored when it began, as it is in workers that run tests side by side
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    etcd = eventually(
        lambda: _daemons(control_plane).get("etcd") or (first.poll() is not None and -1), "etcd or the end of it"
    )
    assert etcd > 0, "it ended before it could be interrupted"
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait(PATIENCE_SECONDS) != 0
    assert up(control_plane).returncode == 0
    assert _daemons(control_plane)["etcd"] == etcd


@pytest.mark.api_server
def test_a_cluster_ends_with_the_process_that_it_was_started_for(control_plane: dict[str, str]) -> None:
    session = subprocess.Popen(["sleep", "3600"])
    done = up(control_plane, "--until-end-of", str(session.pid))
    assert done.returncode == 0, done.stderr
    daemons = _daemons(control_plane)
    assert daemons.keys() == {"end-with", "etcd", "apiserver", "controller-manager"}
    session.kill()
    session.wait()
    all_end(daemons.values())
    folder = Path(control_plane["DDPJOB_CLUSTER_DIR"] + "-api")
    eventually(lambda: not folder.exists(), "the folder is removed", instead=lambda: sorted(folder.iterdir()))


@pytest.mark.api_server
def test_a_cluster_that_was_up_before_outlives_the_process_that_found_it(control_plane: dict[str, str]) -> None:
    assert up(control_plane).returncode == 0
    before = _daemons(control_plane)
    assert up(control_plane, "--until-end-of", str(os.getpid())).returncode == 0
    assert _daemons(control_plane) == before


@pytest.mark.api_server
def test_a_daemon_that_cannot_start_is_named_at_once(control_plane: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(control_plane["DDPJOB_CLUSTER_PORT"]) + 1))
        taken.listen()
        began = time.monotonic()
        done = up(control_plane)
    assert done.returncode == 1
    assert "etcd has ended" in done.stderr
    assert "address already in use" in done.stderr
    assert time.monotonic() - began < 60, "for so long it waits for one that runs"


def up(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return run(environment, "up", "--control-plane-only", *options, seconds=300)


def _daemons(environment: dict[str, str]) -> dict[str, int]:
    files = Path(environment["DDPJOB_CLUSTER_DIR"] + "-api", "run").glob("*.pid")
    return {file.stem: int(text.split()[0]) for file in files if len((text := file.read_text()).split()) == 2}


def _processes_of(folder: Path) -> set[str]:
    """Command lines that name this folder."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return {line for line in found if str(folder) in line}


def test_the_scripts_name_no_registry_and_no_machine() -> None:
    scripts = [*SCRIPT.parent.glob("*.sh"), *(SCRIPT.parent / "lib").iterdir(), *(ROOT / "requirements").glob("*.sh")]
    assert len(scripts) > 10
    for script in scripts:
        text = script.read_text()
        named = re.findall(r"https?://[\w.-]+\.[a-z]{2,}", text)
        assert [url for url in named if not url.endswith(".svc")] == [], script
        assert "/root/" not in text, script


def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [
        *SCRIPT.parent.glob("*.sh"),
        SCRIPT.parent / "lib" / "replace_volumes.sh",
        SCRIPT.parent / "lib" / "end_with.sh",
        *(ROOT / "requirements").glob("*.sh"),
    ]
    command = [program("shells", "shellcheck"), "-x", "-a", *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parent)
    assert done.stdout == ""


STORES = ("content.v1.content", "snapshotter.v1.overlayfs", "metadata.v1.bolt")
NO_DATABASES = 'cp() { case "$*" in *.own) return 1 ;; *) command cp "$@" ;; esac; }'
"""In the shell: the copy of a database fails."""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """A node whose containerd has a layer and a database, and a new one."""
    for name in ("node-1", "node-2"):
        for folder in ("containerd", "images"):
            (tmp_path / name / folder).mkdir(parents=True)
    for store in STORES:
        folder = tmp_path / "node-1" / "containerd" / f"io.containerd.{store}"
        folder.mkdir()
        (folder / "layer").write_text("layer")
        (folder / "some.db").write_text("database")
    (tmp_path / "node-1" / "images" / "localhost_image_1").write_text("stamp")
    return tmp_path


def kept_images(folder: Path, *commands: str) -> None:
    script = "\n".join(("set -euo pipefail", f"CACHE={folder} DIR={folder}", f". {LIB}/kept_images.sh", *commands))
    subprocess.run(["bash", "-c", script], check=True, timeout=60)


def test_a_new_node_has_the_kept_images_and_databases_of_its_own(nodes: Path) -> None:
    kept_images(nodes, "keep_images 1", f"with_kept_images {nodes}/node-2")
    assert not list((nodes / "node-1" / "containerd").iterdir())
    kept, new = nodes / "node-images", nodes / "node-2"
    for store in STORES:
        one, other = (folder / "containerd" / f"io.containerd.{store}" for folder in (kept, new))
        assert (one / "layer").samefile(other / "layer")
        assert not (one / "some.db").samefile(other / "some.db")
        assert (other / "some.db").read_text() == "database"
    assert (new / "images" / "localhost_image_1").read_text() == "stamp"
    assert sorted(entry.name for entry in new.iterdir()) == ["containerd", "images"]


def test_a_node_has_all_of_the_kept_images_or_none(nodes: Path) -> None:
    """On a part of them, its containerd would write to the databases of all nodes."""
    kept_images(nodes, "keep_images 1", NO_DATABASES, f"with_kept_images {nodes}/node-2")
    new = nodes / "node-2"
    assert sorted(str(entry.relative_to(new)) for entry in new.rglob("*")) == ["containerd", "images"]
    kept_images(nodes, f"with_kept_images {new}")
    assert (new / "images" / "localhost_image_1").exists(), "the next try has them"
