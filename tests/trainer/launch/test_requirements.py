"""Packages that submitted code requires: one environment for each set of them, made by node rank 0."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from types import MappingProxyType
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.support.wheels import wheel
from tests.trainer.launch.submitted import submitted

from ddp_trainer.contract import processes
from ddp_trainer.contract.environment import PodEnvironment, SubmittedCode, Target
from ddp_trainer.contract.exit_codes import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USER, UserError
from ddp_trainer.launch import requirements
from ddp_trainer.launch.code import put_code
from ddp_trainer.launch.leftovers import sync
from ddp_trainer.launch.pip_output import (
    IndexFails,
    PipKilled,
    hash_errors,
    pip_errors,
    unreachable,
    without_secrets,
)
from ddp_trainer.launch.pod import Pod
from ddp_trainer.launch.requirements import (
    AnotherEnvironment,
    Interrupted,
    environment_key,
    image_packages,
    is_ready,
    packages,
    pip_command,
    read_requirements,
    site_packages,
)


@pytest.fixture
def required(pod: PodEnvironment, tmp_path: Path) -> Callable[..., PodEnvironment]:
    """Node rank 0 of two, with code that has these files."""

    def with_code(text: str, files: Mapping[str, str | bytes] = MappingProxyType({})) -> PodEnvironment:
        shared = tmp_path / "shared"
        code = submitted(tmp_path / "archives", {"requirements.txt": text, **files}, "requirements.txt")
        placed = replace(pod, code=code, shared=shared)
        put_code(placed)
        return placed

    return with_code


def go_on(seconds: float) -> bool:
    time.sleep(min(seconds, 0.05))
    return True


SHOW = """
import greeting, importlib.metadata, os
print(os.path.realpath(greeting.__file__), importlib.metadata.version("torch"))
"""


@pytest.mark.processes
def test_node_rank_0_installs_once_for_all_beside_what_the_image_has(required, tmp_path, monkeypatch, capfd) -> None:
    sha256 = wheel(tmp_path / "wheels")
    torch = importlib.metadata.version("torch")
    first = required(f"--no-index\n--find-links {tmp_path}/wheels\ngreeting==1.0 --hash=sha256:{sha256}\n")
    found: list[Path | None] = []
    waiting = threading.Thread(target=lambda: found.append(packages(replace(first, node_rank=1), go_on)))
    monkeypatch.setattr(requirements, "SAY_SECONDS", 0.0)
    waiting.start()
    folder = packages(first, go_on)
    waiting.join()
    assert found == [folder]
    assert folder is not None
    assert (folder / "greeting.py").exists()
    assert not (folder / "torch").exists()
    (env,) = (first.shared / "envs").iterdir()
    shell = [str(first.shared / "work" / f".{first.job}" / "environment" / "bin" / "python"), "-c", SHOW]
    assert run(shell, text=True, capture_output=True, check=True).stdout.split() == [str(folder / "greeting.py"), torch]
    made = json.loads((env / "ddpjob.json").read_text())
    assert (made["installed"], made["pinned"]["torch"]) == ({"greeting": "1.0"}, torch)
    said = capfd.readouterr()
    assert f"still waiting for node rank 0 to install requirements.txt as envs/{env.name}" in said.err
    assert "Successfully installed greeting-1.0" in said.err
    assert packages(first, go_on) == folder
    assert "installed already" in capfd.readouterr().err


@pytest.mark.processes
def test_wheels_on_the_volume_are_named_by_its_variable(required, monkeypatch) -> None:
    """As docs/bring-your-script.md has it: with `ddpjob run` the volume is another folder than in a pod."""
    pod = required("--no-index\n--find-links ${DDPJOB_SHARED}/wheels\ngreeting\n")
    wheel(pod.shared / "wheels")
    monkeypatch.setenv("DDPJOB_SHARED", str(pod.shared))
    folder = packages(pod, go_on)
    assert folder is not None
    assert (folder / "greeting.py").exists()


@pytest.mark.processes
def test_requirements_that_contradict_the_image_are_one_error_with_the_words_of_pip(required, tmp_path) -> None:
    wheel(tmp_path / "wheels", requires="torch<1")
    says = (
        r"requirements.txt cannot be installed: greeting 1.0 depends on torch<1 \| .*torch.*==.*; correct it and submit"
    )
    with pytest.raises(UserError, match=says):
        packages(required(f"--no-index\n--find-links {tmp_path}/wheels\ngreeting\n"), go_on)
    assert list((tmp_path / "shared/envs").iterdir()) == []


@pytest.mark.processes
def test_a_host_that_pip_does_not_trust_is_named_with_the_fix(required, capfd) -> None:
    says = "pip does not ask 192.0.2.1, which has no HTTPS; serve it with HTTPS, or add PIP_TRUSTED_HOST=192.0.2.1"
    with pytest.raises(UserError, match=re.escape(says)):
        packages(required("--no-index\n--find-links http://192.0.2.1/wheels\ntorch\ngreeting\n"), go_on)
    log = capfd.readouterr().err
    assert "192.0.2.1 is not a trusted or secure host" in log
    assert "already satisfied" not in log, "of each package of the image a line"


LISTED = b'<a href="/greeting-1.0-py3-none-any.whl">greeting-1.0-py3-none-any.whl</a>'


@pytest.fixture
def index() -> Iterator[Callable[[int, int], str]]:
    """A package index that answers with one status for its list of versions, and with another one for a wheel."""
    answers: list[int] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_list = self.path.startswith("/simple/")
            self.send_response(answers[0] if is_list else answers[1])
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            if is_list:
                self.wfile.write(LISTED)

        def log_message(self, *_: object) -> None:
            """Not to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def answering(of_list: int, of_wheel: int) -> str:
        answers[:] = of_list, of_wheel
        return f"http://me:secret@127.0.0.1:{server.server_port}/simple/"

    yield answering
    server.shutdown()
    server.server_close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("of_list", "of_wheel", "error", "says"),
    [
        (503, 200, IndexFails, "answers with 503 Server Error; if it goes on, name another one"),
        (429, 200, IndexFails, "answers with 429 Client Error; if it goes on"),
        (200, 503, IndexFails, "answers with 503 Server Error; if it goes on"),
        (403, 200, UserError, "cannot be installed: the package index answers with 403 Forbidden; name one that"),
        (404, 200, UserError, "cannot be installed: Could not find a version that satisfies the requirement"),
    ],
)
def test_an_index_that_fails_is_not_blamed_on_the_requirements(
    required, index, monkeypatch, tmp_path, of_list, of_wheel, error, says
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(error, match=re.escape(says)) as failure:
        packages(required(f"--index-url {index(of_list, of_wheel)}\ngreeting\n"), go_on)
    assert "secret" not in str(failure.value)
    assert list((tmp_path / "shared/envs").iterdir()) == []


BACKEND = """
import zipfile

def build_wheel(folder, *_):
    name = "built-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("built.py", "")
        wheel.writestr("built-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: built\\nVersion: 1.0\\n")
        wheel.writestr("built-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("built-1.0.dist-info/RECORD", "")
    return name
"""


@pytest.mark.processes
def test_a_package_that_has_to_be_built_is_installed(required) -> None:
    """pip builds it in an environment of its own, which has the standard library."""
    project = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    files = {"package/pyproject.toml": project, "package/backend.py": BACKEND}
    folder = packages(required("--no-index\n./package\n", files), go_on)
    assert folder is not None
    assert (folder / "built.py").exists()


NO_HASH = "0" * 64


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{find}greeting==1.0 --hash=sha256:{sha256}\n{torch} --hash=sha256:{no_hash}", id="locked"),
        pytest.param("{find}-r locks/base.txt", id="another file"),
        pytest.param("--no-index\n./{wheel}", id="a wheel of the folder"),
        pytest.param("--no-index\n./{wheel} --hash=sha256:{sha256}", id="a locked wheel"),
    ],
)
def test_what_is_locked_included_or_in_the_folder_is_installed(required, tmp_path, text) -> None:
    words = {
        "find": f"--no-index\n--find-links {tmp_path}/wheels\n",
        "wheel": "wheels/greeting-1.0-py3-none-any.whl",
        "sha256": wheel(tmp_path / "wheels"),
        "no_hash": NO_HASH,
        # as an index calls it, without the name of the image's build; it is there, so no file is compared
        "torch": f"torch=={importlib.metadata.version('torch').partition('+')[0]}",
    }
    files = {
        "locks/base.txt": f"greeting==1.0 --hash=sha256:{words['sha256']}",
        words["wheel"]: (tmp_path / words["wheel"]).read_bytes(),
    }
    folder = packages(required(text.format(**words), files), go_on)
    assert folder is not None
    assert {path.name for path in folder.glob("*.dist-info")} == {"greeting-1.0.dist-info"}


@pytest.mark.processes
def test_the_environment_of_all_jobs_has_what_was_submitted_and_not_what_a_script_has_written(
    required, tmp_path, capfd
) -> None:
    """Only by their names, the included file would be data, which a launcher leaves as it is."""
    for name in ("greeting", "farewell"):
        wheel(tmp_path / "wheels", name)
    text = f"--no-index\n--find-links {tmp_path}/wheels\n-r env/base.txt"
    pod = required(text, {"env/base.txt": "greeting", "train.py": ""})
    (pod.shared / "work" / pod.job / "env/base.txt").write_text("farewell")
    put_code(pod)
    folder = packages(pod, go_on)
    assert folder is not None
    assert {path.name for path in folder.glob("*.dist-info")} == {"greeting-1.0.dist-info"}
    said = capfd.readouterr().err
    assert "kept what the job has written in the place of its code: env/base.txt" in said
    assert f"code/{pod.code.sha256}" not in said


@pytest.mark.processes
def test_a_wrong_hash_leaves_no_environment_and_the_right_one_is_installed_afterwards(required, tmp_path) -> None:
    right = [f"{name}==1.0 --hash=sha256:{wheel(tmp_path / 'wheels', name)}\n" for name in ("greeting", "other")]
    text = f"--no-index\n--find-links {tmp_path}/wheels\n{right[0]}"
    wrong = required(f"{text}other==1.0 --hash=sha256:{NO_HASH}\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"not the one that was locked: other==1\.0"):
            packages(wrong, go_on)
        assert list((tmp_path / "shared/envs").iterdir()) == []
    folder = packages(required(text + right[1]), go_on)
    assert folder is not None
    assert {path.name for path in folder.glob("*.py")} == {"greeting.py", "other.py"}


@pytest.mark.processes
def test_sigterm_ends_an_installation(required, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(requirements, "pip_command", lambda _: ["sh", "-c", "sleep 600"])
    monkeypatch.setattr(requirements, "_make_environment", lambda folder: folder.mkdir())
    with pytest.raises(Interrupted):
        packages(required("greeting"), lambda seconds: False)
    assert list((tmp_path / "shared/envs").iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "oom_kills", "reason", "says"),
    [
        ("kill -KILL $$", [0, 0], "WorkerKilled", "SIGKILL ended pip$"),
        ("kill -KILL $$", [3, 4], "OutOfMemory", "SIGKILL ended pip: the pod has reached its memory limit"),
        ("exit 247", [0, 0], "WorkerKilled", "SIGKILL ended pip$"),
        ("echo ERROR: failed-wheel-build; exit 1", [0, 1], "OutOfMemory", "a process of pip was killed: the pod has"),
    ],
)
def test_a_pip_that_was_killed_says_nothing_of_the_requirements(
    required, monkeypatch, tmp_path, script, oom_kills, reason, says
) -> None:
    monkeypatch.setattr(requirements, "pip_command", lambda _: ["sh", "-c", script])
    monkeypatch.setattr(requirements, "_make_environment", lambda folder: folder.mkdir())
    counts = iter(oom_kills)
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    with pytest.raises(PipKilled, match=f"^requirements.txt was not installed, since {says}") as failure:
        packages(required("greeting"), go_on)
    assert failure.value.reason == reason
    assert list((tmp_path / "shared/envs").iterdir()) == []


def test_the_wait_for_node_rank_0_ends_when_there_is_no_point_in_it(required) -> None:
    with pytest.raises(Interrupted):
        packages(replace(required("greeting"), node_rank=1), lambda seconds: False)


def test_a_node_of_another_image_or_cpu_than_node_rank_0_does_not_wait_for_ever(required, monkeypatch) -> None:
    def stops(*_: object) -> None:
        raise Interrupted

    first = required("greeting")
    second = replace(first, node_rank=1)
    monkeypatch.setattr(requirements, "_install", stops)
    with pytest.raises(Interrupted):
        packages(first, go_on)
    with pytest.raises(Interrupted):  # of the same image: it waits
        packages(second, lambda seconds: False)
    monkeypatch.setattr(requirements, "environment_key", lambda *_: "f" * 32)
    says = r"^node rank 0 has another environment for requirements.txt than this node \(\S+\) needs, so their images or"
    with pytest.raises(AnotherEnvironment, match=says):
        packages(second, lambda seconds: False)
    for other in (replace(second, attempt=1), replace(second, uid="of an earlier job"), replace(second, live=True)):
        with pytest.raises(Interrupted):
            packages(other, lambda seconds: False)


def test_a_new_node_is_compared_with_a_node_rank_0_that_stayed_for_a_later_attempt(required) -> None:
    """With restarts in place: it may have a newer image of the same tag."""
    first = replace(required("greeting"), attempt=3)
    stop: Any = None  # nothing waits
    kept = replace(first, site_packages=site_packages(first.shared / "envs" / ("a" * 32)))
    assert Pod(kept, Target("script", "train.py", ()), None, stop, 0.0)._have_packages("requirements.txt") is None
    with pytest.raises(AnotherEnvironment):
        packages(replace(first, node_rank=1), lambda seconds: False)


@pytest.mark.processes
def test_an_environment_is_on_the_disk_before_it_has_its_name(required, tmp_path, monkeypatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    wheel(tmp_path / "wheels")
    pod = required(f"--no-index\n--find-links {tmp_path}/wheels\ngreeting\n")
    monkeypatch.setattr(os, "fsync", noted)
    folder = packages(pod, go_on)
    assert folder is not None
    (env,) = (tmp_path / "shared/envs").iterdir()
    made = [path for path in env.rglob("*") if not path.is_symlink()]
    assert folder / "greeting.py" in made
    assert {path.relative_to(env).as_posix() for path in made} <= {
        path.relative_to(env.parent).as_posix().partition("/")[2] for path in synced if path.parts[-2] != "envs"
    }
    assert all(path.relative_to(env.parent).parts[0].startswith(".") for path in synced)


@pytest.mark.parametrize("content", [b"", bytes(300), b"{", b"[]"])
def test_an_environment_whose_marker_has_lost_its_bytes_is_not_used(tmp_path: Path, content: bytes) -> None:
    """As after a power cut, where the file outlives it and its bytes do not."""
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / requirements.MARKER).write_bytes(content)
    assert not is_ready(tmp_path / "key")


def test_an_environment_whose_marker_cannot_be_read_just_now_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    (tmp_path / "key").mkdir()
    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(OSError, match="Input/output error"):
        is_ready(tmp_path / "key")


def test_a_folder_is_synced_with_all_below_it_and_not_what_its_links_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_bytes(b"x")
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_bytes(b"x")
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "none")
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    sync(folder)
    assert synced[0] == folder / "below" / "file"
    assert sorted(synced[1:]) == [folder, folder / "below"]


def test_a_sync_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        sync(tmp_path)


def test_an_environment_without_its_marker_is_not_used(tmp_path: Path) -> None:
    site_packages(tmp_path / "envs/key").mkdir(parents=True)
    assert not is_ready(tmp_path / "envs/key")
    assert not is_ready(tmp_path / "none/key")


@pytest.mark.processes
def test_an_environment_sees_the_packages_that_ranks_see_and_no_others(tmp_path) -> None:
    python = requirements._make_environment(tmp_path / "env")
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    seen = json.loads(run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
    own = str(requirements.site_packages(tmp_path / "env"))
    assert seen.index(own) < seen.index(sysconfig.get_path("purelib"))
    assert set(seen) - {own} <= set(sys.path), "below an environment there is another Python with packages of its own"


def test_code_without_requirements_needs_no_environment(pod: PodEnvironment) -> None:
    assert packages(pod, go_on) is None


def test_a_requirements_file_that_the_code_does_not_have_is_named(required) -> None:
    pod = required("greeting")
    with pytest.raises(UserError, match=r"has no other\.txt"):
        packages(replace(pod, code=replace(pod.code, requirements="other.txt")), go_on)


def key(folder: Path, **files: str) -> str:
    folder.mkdir()
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return environment_key(
        read_requirements(folder, "r"), hashlib.sha256(repr(files).encode()).hexdigest(), "2.9.1+cpu"
    )


@pytest.mark.parametrize(
    ("files", "changed", "same"),
    [
        pytest.param({"r": "a"}, {"r": "a", "train.py": "1"}, True, id="other code"),
        pytest.param({"r": "a"}, {"r": "b"}, False, id="other requirements"),
        pytest.param({"r": "-r d/b", "d__b": "b"}, {"r": "-r d/b", "d__b": "c"}, False, id="an included file"),
        pytest.param(
            {"r": "-r d/a", "d__a": "-c c", "d__c": "x<1"}, {"r": "-r d/a", "d__a": "-c c", "d__c": "x<2"}, False,
            id="constraints of an included file",
        ),
        pytest.param({"r": "-r r"}, {"r": "-r r"}, True, id="a file that includes itself"),
        pytest.param({"r": "./p", "p__x": "1"}, {"r": "./p", "p__x": "2"}, False, id="a package of the folder"),
        pytest.param({"r": "-e p[x]", "p__x": "1"}, {"r": "-e p[x]", "p__x": "2"}, False, id="an editable one"),
        pytest.param(
            {"r": "--find-links=w", "w__x": "1"}, {"r": "--find-links=w", "w__x": "2"}, False, id="wheels of the folder"
        ),
        *(
            pytest.param({"r": line, "p__x": "1"}, {"r": line, "p__x": "2"}, False, id=line)
            for line in ("./p/x#egg=x", "./p/x;python_version>'3'", "-e p#egg=x", "-ep[y]", "-fp", "x @ file:p/x#a=b")
        ),
        *(
            pytest.param({"r": line, "p-ext__x": "1"}, {"r": line, "p-ext__x": "2"}, False, id=line)
            for line in ("./p-ext", "-e ./p-ext", "x @ file:./p-ext")
        ),
        pytest.param(
            {"r": '-r "d/b" # ours', "d__b": "b"}, {"r": '-r "d/b" # ours', "d__b": "c"}, False, id="in quotes"
        ),
        pytest.param({"r": "-r \\\nd", "d": "b"}, {"r": "-r \\\nd", "d": "c"}, False, id="over two lines"),
        pytest.param({"r": "a # see p", "p__x": "1"}, {"r": "a # see p", "p__x": "2"}, True, id="a comment"),
    ],
)  # fmt: skip
def test_an_environment_serves_all_code_with_the_same_requirements(tmp_path, files, changed, same) -> None:
    assert (key(tmp_path / "a", **files) == key(tmp_path / "b", **changed)) == same


@pytest.mark.parametrize("line", ["mypkg @ {url}", "-r {url}"])
@pytest.mark.parametrize("length", [900, 5000])
def test_a_signed_url_is_no_file_of_the_folder_however_long_it_is(tmp_path: Path, line: str, length: int) -> None:
    text = line.format(url=f"https://host/mypkg-1.0.tar.gz?X-Amz-Security-Token={'x' * length}")
    (tmp_path / "r").write_text(text)
    assert read_requirements(tmp_path, "r") == ({"r": text}, False)


def test_an_environment_is_of_one_python_and_of_what_the_image_has(tmp_path: Path, monkeypatch) -> None:
    """What an image has is not installed again: another image may lack it, or have a torch of another build."""
    (tmp_path / "r").write_text("a")
    for name in ("torch-2.9.1+cpu.dist-info", "torch", "old-1.egg-info"):
        (tmp_path / "site" / name).mkdir(parents=True)
    image = image_packages([str(tmp_path / "site"), str(tmp_path / "none.zip")])
    assert image == {"torch-2.9.1+cpu.dist-info", "old-1.egg-info"}
    source = read_requirements(tmp_path, "r")
    keys = {environment_key(source, "0" * 64, found) for found in (image, {"torch-2.9.1.dist-info"}, set[str]())}
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    keys.add(environment_key(source, "0" * 64, image))
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["Collecting x", "WARNING: old", "ERROR: A", "ERROR: B", "[notice] new pip"], "A | B"),
        (["Traceback", "  deep", "OSError: no", ""], "Traceback | deep | OSError: no"),
        (["ERROR: A", "The conflict is caused by:", "    x 1 wants y<1", "    you want y>1", "", "To fix"],
         "x 1 wants y<1 | you want y>1"),
        ([], "pip printed nothing"),
    ],
)  # fmt: skip
def test_the_error_lines_of_pip_are_what_is_reported(lines: list[str], says: str) -> None:
    assert pip_errors(lines) == says


FROM = "from file:///w/x-1.0-py3-none-any.whl (from -r r.txt (line 3))"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If", f"    x==1.0 {FROM}:",
          "        Expected sha256 aa", "        Expected     or bb", "             Got        cc", "", "WARNING: old"],
         f"a package is not the one that was locked: x==1.0 {FROM}: got cc"),
        (["ERROR: Hashes are required in --require-hashes mode, but", "    x==1.0 --hash=sha256:aa", "    y==2.0"],
         "where one package has a hash, all need one: x==1.0 --hash=sha256:aa | y==2.0"),
        (["ERROR: In --require-hashes mode, all requirements must have", f"    y {FROM}"],
         f"where one package has a hash, all need one: y {FROM}"),
        (["ERROR: Can't verify hashes for these file:// requirements because", "    file:///work/p (from -r r.txt)"],
         "folders and repositories have no hash, and here all packages need one: file:///work/p (from -r r.txt)"),
        (["  x --hash=sha256:aa", "ERROR: another error"], ""),
    ],
)  # fmt: skip
def test_a_hash_that_is_wrong_or_missing_is_reported_with_its_package(lines: list[str], says: str) -> None:
    assert (hash_errors(["Collecting x", *lines]) or ("",))[0] == says


RETRY = "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
NONE = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([RETRY + "'NewConnectionError('<pip._vendor.HTTPSConnection object at 0x7f>: Failed to establish a new "
          "connection: [Errno -3] Temporary failure in name resolution')': /simple/x/", NONE],
         "NewConnectionError('Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')"),
        ([RETRY + "'ConnectTimeoutError(<pip._vendor.HTTPSConnection object at 0x7f>, 'timed out')': /simple/x/", NONE],
         "ConnectTimeoutError('timed out')"),
        ([NONE], ""),
        ([RETRY + "'ProtocolError('Connection aborted.')': /simple/x/", "ERROR: Failed building wheel for x"], ""),
    ],
)  # fmt: skip
def test_an_index_that_the_pod_does_not_reach_is_told_from_a_package_that_it_lacks(lines: list[str], says: str) -> None:
    assert unreachable(lines) == says


@pytest.mark.parametrize(
    ("line", "shows"),
    [
        ("ERROR: HTTP error 403 while getting https://host/a.whl?X-Signature=abc", "https://host/a.whl?***"),
        ("ERROR: Invalid requirement: 'a @@ https://me:pass@host/a.whl': Expected", "'a @@ https://***@host/a.whl'"),
        ("  fatal: could not read Password for 'https://token@host': terminal", "for 'https://***@host': terminal"),
        ("WARNING: Retrying (…) after connection broken by 'X(…)': /a.whl?token=abc", "by 'X(…)': /a.whl?***"),
        ("Successfully installed greeting-1.0", "Successfully installed greeting-1.0"),
    ],
)
def test_what_is_secret_in_a_line_of_pip_is_not_shown(line: str, shows: str) -> None:
    shown = without_secrets(line)
    assert shows in shown
    assert not re.search("abc|pass|token", shown)


@pytest.mark.processes
def test_a_token_in_the_requirements_is_neither_in_the_message_nor_in_the_log(required, capfd) -> None:
    with pytest.raises(UserError, match="Invalid requirement") as failure:
        packages(required("greeting @@ https://me:secret-token@127.0.0.1/greeting.whl"), go_on)
    assert "secret-token" not in str(failure.value) + capfd.readouterr().err


def test_pip_is_the_images_or_the_one_that_python_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path("/env/bin/python")
    find = importlib.util.find_spec
    # an environment that uv made has no pip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("zipfile" if name == "pip" else name))
    assert pip_command(python)[1:] == ["-P", "-m", "pip", "--python", "/env/bin/python"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    interpreter, pip = pip_command(python)
    assert interpreter == str(python)
    assert zipfile.is_zipfile(Path(pip).parent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)  # Debian's Python has pip's wheel elsewhere
    with pytest.raises(UserError, match=r"no pip.*image of your own.*spec\.image"):
        pip_command(python)


USES_ITS_PACKAGE = """
    import os, sys
    from pathlib import Path
    import greeting
    Path("result.txt").write_text(f"{greeting.TEXT} {greeting.__file__} {os.environ['DDPJOB_ATTEMPT']}")
"""


def variables(code: SubmittedCode) -> dict[str, str]:
    return {
        "DDPJOB_CODE_DIR": str(code.archives),
        "DDPJOB_CODE_SHA256": code.sha256,
        "DDPJOB_CODE_REQUIREMENTS": code.requirements or "",
    }


def test_a_pod_that_waits_for_packages_installs_them_once_it_is_node_rank_0(tmp_path, start_pod, place) -> None:
    """It waits as node rank 1, is a spare in the next attempt, and in the last one the first node."""
    wheel(tmp_path / "wheels")
    files = {"requirements.txt": f"--no-index\n--find-links {tmp_path}/wheels\ngreeting\n"}
    code = submitted(tmp_path / "archives", files | {"train.py": textwrap.dedent(USES_ITS_PACKAGE)}, "requirements.txt")
    folder = place(tmp_path / "assignment", attempt=0, node_rank=1, nodes=2)
    pod = start_pod("", argv=["--script", "train.py"], DDPJOB_ASSIGNMENT_DIR=str(folder), **variables(code))
    pod.wait_for("waiting for node rank 0 to install requirements.txt")
    assert (pod.status()["phase"], pod.status()["ranks"]) == ("requirements", [])
    place(folder, attempt=1, node_rank="none", nodes=1)
    eventually(lambda: pod.status()["phase"] == "spare", "a spare")
    assert not (pod.shared / "envs").exists()
    place(folder, attempt=2, node_rank=0, nodes=1)
    assert pod.wait() == 0, pod.log
    (env,) = (pod.shared / "envs").iterdir()
    expected = f"hello from greeting {site_packages(env)}/greeting.py 2"
    assert (pod.shared / "work/digits/result.txt").read_text() == expected
    assert f"installing requirements.txt as envs/{env.name}" in pod.log


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no-such-package-at-all", ".*No matching distribution found for no-such-package-at-all; correct it and"),
        (f"greeting==1.0 --hash=sha256:{NO_HASH}",
         r"a package is not the one that was locked: greeting==1.0 from file:///\S*/greeting-1.0-py3-none-any.whl "
         r"\(from -r r.txt \(line 3\)\): got {sha256}; lock the file again, if you trust this one, and submit"),
    ],
)  # fmt: skip
def test_requirements_that_cannot_be_installed_fail_the_job_before_torchrun_starts(
    tmp_path, start_pod, text, says
) -> None:
    sha256 = wheel(tmp_path / "wheels")
    lines = f"--no-index\n--find-links {tmp_path}/wheels\n{text}\n"
    code = submitted(tmp_path / "archives", {"r.txt": lines, "train.py": ""}, "r.txt")
    pod = start_pod("", argv=["--script", "train.py"], **variables(code))
    assert pod.wait() == EXIT_USER
    assert pod.message["reason"] == "UserError"
    assert re.match(f"r.txt cannot be installed: {says.format(sha256=sha256)}", pod.message["message"])
    assert "\n" not in pod.message["message"]
    assert list((pod.shared / "envs").iterdir()) == []


def test_a_pip_that_is_killed_is_tried_again_by_a_restart(tmp_path, start_pod) -> None:
    files = {
        "r.txt": "--no-index\n./package\n",
        "package/pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "package/backend.py": "import os; os.kill(os.getppid(), 9)",
        "train.py": "",
    }
    pod = start_pod("", argv=["--script", "train.py"], **variables(submitted(tmp_path / "archives", files, "r.txt")))
    assert pod.wait() == EXIT_FAILED
    assert pod.message["reason"] == "WorkerKilled"
    assert pod.message["message"] == "r.txt was not installed, since SIGKILL ended pip"


@pytest.mark.parametrize(("live", "reason"), [({}, "Preempted"), ({"DDPJOB_LIVE": "true"}, "Left")])
def test_sigterm_while_packages_are_awaited_ends_the_pod_as_preempted(tmp_path, start_pod, live, reason) -> None:
    code = submitted(tmp_path / "archives", {"r.txt": "greeting", "train.py": ""}, "r.txt")
    places = {"DDPJOB_NODE_RANK": "1", "DDPJOB_NODES": "2"}
    pod = start_pod("", argv=["--script", "train.py"], **places, **variables(code), **live)
    pod.wait_for("waiting for node rank 0")
    pod.process.terminate()
    assert pod.wait() == EXIT_PREEMPTED
    assert pod.message["reason"] == reason
    assert pod.message["message"] == "stopped by SIGTERM before r.txt was installed and any rank had started"
