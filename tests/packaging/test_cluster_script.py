"""The script behind the test cluster: which cluster it chooses, and what it says where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "cluster" / "cluster.sh"


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


def run(environment: dict[str, str], *arguments: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        user=user,
        timeout=60,
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


def test_down_where_nothing_runs_is_no_error(environment: dict[str, str]) -> None:
    assert run(environment, "down", "--control-plane-only").returncode == (0 if _possible(environment) else 3)


def _possible(environment: dict[str, str]) -> bool:
    return run(environment, "choose", "--control-plane-only").returncode == 0


def test_status_of_a_cluster_that_does_not_run_is_1(environment: dict[str, str]) -> None:
    if not _possible(environment):
        pytest.skip("no cluster is possible on this machine")
    done = run(environment, "status", "--control-plane-only")
    assert (done.returncode, done.stdout) == (1, "")


def test_the_scripts_name_no_registry_and_no_machine() -> None:
    scripts = [*SCRIPT.parent.glob("*.sh"), *(SCRIPT.parent / "lib").iterdir(), *(ROOT / "requirements").glob("*.sh")]
    assert len(scripts) > 10
    for script in scripts:
        text = script.read_text()
        assert "pypi" not in text.lower(), script
        assert "debian.org" not in text, script
        assert "/work/" not in text, script


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian package shellcheck)"
)
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [
        *SCRIPT.parent.glob("*.sh"),
        SCRIPT.parent / "lib" / "replace_volumes.sh",
        *(ROOT / "requirements").glob("*.sh"),
    ]
    done = subprocess.run(
        ["shellcheck", "-x", "-a", *scripts], capture_output=True, text=True, check=False, cwd=SCRIPT.parent
    )
    assert done.stdout == ""
