"""What a person gets who installs a part of the project: all that it needs, and nothing of the other parts.

Each extra is installed, from what pip builds of the repository, into an environment of its own that has nothing else.
"""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]


PIP = [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution itself, as pip builds it from the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "-qq", "--no-deps", "--wheel-dir", folder, ROOT], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, wheel: Path):
    """Install extras into an environment of their own; returns its Python. torch's version is pinned as everywhere
    else, and it is that of this environment: pip installs what it needs besides.
    """

    @cache
    def install(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("-".join(extras))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        if "trainer" in extras:
            link_torch(folder)
        # what is run once is compiled as far as it is imported
        into = [*PIP, "--python", folder, "install", "-qq", "--no-compile"]
        requirement = f"{wheel}[{','.join(extras)}]"
        subprocess.run([*into, "-c", ROOT / "requirements/torch.txt", requirement], check=True, cwd=folder)
        return folder / "bin" / "python"

    return install


def link_torch(environment: Path) -> None:
    """To unpack and to compile it once more takes longer than all else here."""
    torch = distribution("torch")
    files = {path.parts[0] for path in torch.files or () if path.parts[0] != ".."}
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for name in files:
        (packages / name).symlink_to(Path(str(torch.locate_file(name))).resolve())


def modules(python: Path, *names: str) -> dict[str, bool]:
    """Which of these modules an environment has, seen from outside the repository."""
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
    found = subprocess.run(
        [python, "-I", "-c", code, *names], capture_output=True, text=True, check=True, cwd=python.parent
    )
    return {name: name in found.stdout.split() for name in names}


def run(python: Path, *argv: str) -> str:
    done = subprocess.run([python, *argv], capture_output=True, text=True, check=True, cwd=python.parent)
    return done.stdout


def test_the_operator_runs_without_torch(install) -> None:
    python = install("operator")
    assert modules(python, "ddpjob_operator", "kopf", "kubernetes", "torch", "sklearn") == {
        "ddpjob_operator": True,
        "kopf": True,
        "kubernetes": True,
        "torch": False,
        "sklearn": False,
    }
    run(python, "-c", "import ddpjob_operator.main")


def test_type_checkers_find_the_types_of_every_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ddpjob/py.typed", "ddpjob_operator/py.typed", "ddp_trainer/py.typed"} <= set(names)


CLIENT = """\
from ddpjob import DDPJob, Job

job: Job = DDPJob(script="train.py", nodes=2, args=["--lr", "3e-4"]).submit(namespace="team")
lines: list[str] = [line.text for line in job.logs(rank=0)]
restarts: int = job.wait(seconds=60).restarts
"""
MYPY = """\
[mypy]
strict = true
[mypy-aiohttp.*,jinja2.*,kubernetes.*,prometheus_client.*,rich.*,typer.*]
follow_imports = skip
"""
"""Libraries whose types a program does not see cost mypy half a minute."""


def test_mypy_checks_a_program_that_uses_the_client(install, tmp_path: Path) -> None:
    python = install("cli")
    (tmp_path / "right.py").write_text(CLIENT)
    (tmp_path / "wrong.py").write_text(CLIENT.replace("nodes=2", 'nodes="two"'))
    (tmp_path / "mypy.ini").write_text(MYPY)
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", "--python-executable", python]
    checked = subprocess.run([*mypy, "right.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True)
    (said,) = checked.stdout.splitlines()
    assert said.startswith('wrong.py:3: error: Argument "nodes" to "DDPJob" has incompatible type "str"')


def test_the_command_line_checks_a_job_and_asks_a_cluster_without_torch_or_kopf(install, tmp_path: Path) -> None:
    python = install("cli")
    assert modules(python, "torch", "kopf", "kubernetes") == {"torch": False, "kopf": False, "kubernetes": True}
    run(python, "-c", "import ddpjob_operator.cli.dashboard")
    sample = str(ROOT / "manifests/samples/ddpjob.yaml")
    for script in ("ddpjob", "kubectl-ddpjob"):
        run(python, str(python.parent / script), "validate", sample)
    assert run(python, str(python.parent / "kubectl_complete-ddpjob"), "valid").startswith("validate\t")
    nowhere = {"KUBECONFIG": str(tmp_path / "nowhere")}
    asked = subprocess.run([python.parent / "ddpjob", "why", "digits"], env=nowhere, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "cannot use the kubeconfig" in asked.stderr


def test_the_command_line_runs_with_the_oldest_versions_that_are_allowed(tmp_path: Path, wheel: Path) -> None:
    """Of packages in Python alone: the others may have no wheel that old for this Python."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = {asked.name: asked.specifier for asked in map(Requirement, extras["cli"]) if asked.name != "aiohttp"}
    oldest = [f"{name}=={next(iter(bounds)).version}" for name, bounds in allowed.items()]
    (tmp_path / "oldest.txt").write_text("\n".join(oldest))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    into = [*PIP, "--python", tmp_path / "venv", "install", "-qq", "--no-compile", "-c", tmp_path / "oldest.txt"]
    subprocess.run([*into, f"{wheel}[cli]"], check=True, cwd=tmp_path)
    assert "--chaos" in run(python, str(python.parent / "ddpjob"), "run", "--help")
    run(python, "-c", "import ddpjob_operator.cli.dashboard")
    run(python, str(python.parent / "ddpjob"), "validate", str(ROOT / "manifests/samples/ddpjob.yaml"))


def test_the_trainer_runs_without_kopf_or_a_cluster_client(install) -> None:
    python = install("trainer")
    assert modules(python, "ddp_trainer", "torch", "kopf", "kubernetes") == {
        "ddp_trainer": True,
        "torch": True,
        "kopf": False,
        "kubernetes": False,
    }
    assert "--task" in run(python, "-m", "ddp_trainer.train", "--help")


def test_the_pages_of_the_dashboard_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    page = ROOT / "operator/ddpjob_operator/page"
    files = [file for folder in ("templates", "static") for file in (page / folder).iterdir()]
    assert {f"ddpjob_operator/page/{file.parent.name}/{file.name}" for file in files} <= names
