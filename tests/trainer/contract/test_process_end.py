"""A process whose result is settled ends with it, though taking the interpreter apart would abort."""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import os
import re
import shelve
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from ddp_trainer.contract import process_end, unfinished
from ddp_trainer.contract.outcomes import read_outcomes
from ddp_trainer.contract.process_end import GLOO_THREADS, await_gloo
from ddp_trainer.contract.processes import is_active

ROOT = Path(__file__).parents[3]
PR_SET_NAME = 15
ABORTS = """
import ctypes

# called where C++ destroys its globals, after every exit handler of Python: what gloo's and obstore's threads meet
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
"""
SCRIPT = f"""{ABORTS}
import atexit, sys, threading, time
import torch.distributed as dist

dist.init_process_group("gloo")
atexit.register(lambda: print("exit handlers ran, in a group:", dist.is_initialized()))

def late():
    time.sleep(0.5)
    print("a thread was waited for")

threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("ddp_trainer.initialize", []), ("ddp_trainer.train", ["--no-such-flag"])],
)
@pytest.mark.processes
def test_a_refusal_keeps_its_exit_code(module: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    own = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
    own["PYTHONPATH"] = f"{tmp_path}:{ROOT / 'trainer_image'}"
    ended = subprocess.run([sys.executable, "-m", module, *arguments], env=own, capture_output=True, timeout=120)
    assert ended.returncode == 64, ended.stderr.decode()


def run_rank(
    script: str, folder: Path, kind: str = "script", name: str = "script.py"
) -> subprocess.CompletedProcess[str]:
    """One rank of one, as torchrun starts it; its output goes to a pipe, and is lost unless it is flushed."""
    path = folder / "script.py"
    path.write_text(script)
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")},
        "PYTHONPATH": f"{ROOT / 'trainer_image'}:{folder}",
        "DDPJOB_RUN_DIR": str(folder / "run"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "-m", "ddp_trainer.rank.worker", kind, str(path) if kind == "script" else name]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_a_rank_that_is_done_runs_its_exit_handlers_and_leaves_its_groups(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["a thread was waited for", "exit handlers ran, in a group: True"]


CLOSES = """
import logging, sys
from pathlib import Path

class Tee:
    def __init__(self, stream):
        self.stream, self.file = stream, Path(sys.argv[0]).with_name("log.txt").open("w")

    def write(self, text):
        self.file.write(text)
        self.stream.write(text)

    def flush(self):
        self.file.flush()

"""


@pytest.mark.parametrize(
    "last_lines",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "sys.stdout = sys.stderr = Tee(sys.stderr); sys.stderr.file.close()",
    ],
)
@pytest.mark.processes
def test_a_script_that_closes_its_streams_is_judged_by_what_it_did(last_lines: str, tmp_path: Path) -> None:
    ended = run_rank(CLOSES + last_lines, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["reason"] == "Completed"
    ended = run_rank(f"{CLOSES}{last_lines}\nraise ValueError('loss is NaN')", tmp_path)
    assert ended.returncode == 1
    assert "ValueError: loss is NaN" in ended.stderr


UNCLOSED = """
import csv, gzip, sys

def written():
    return [open("text", "w"), open("bytes", "wb"), gzip.open("text.gz", "wt"), open("closed", "w"), open("read")]

text, data, packed, closed, read = files = written()
csv.writer(text).writerow([1, 2])
data.write(b"data")
packed.write("packed")
closed.close()
"""


@pytest.mark.parametrize("last_line", ["", "sys.exit(0)", "raise ValueError", "import gc; gc.freeze()"])
@pytest.mark.processes
def test_files_that_a_script_leaves_open_have_all_that_it_wrote(last_line: str, tmp_path: Path) -> None:
    (tmp_path / "read").write_text("as it was")
    run_rank(f"import os; os.chdir({str(tmp_path)!r}){UNCLOSED}{last_line}", tmp_path)
    assert (tmp_path / "text").read_text().split() == ["1,2"]
    assert (tmp_path / "bytes").read_bytes() == b"data"
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"packed"
    assert (tmp_path / "read").read_text() == "as it was"


ARCHIVES = """
import shelve, sys, tarfile, zipfile

def opened():
    return zipfile.ZipFile("a.zip", "w"), tarfile.open("a.tgz", "w|gz"), shelve.open("shelf", writeback=True)

packed, streamed, shelf = opened()
packed.writestr("name", "text")
part = packed.open("part", "w")
part.write(b"a part")
streamed.add("whole")
shelf["steps"] = [1]
shelf["steps"].append(2)
"""


@pytest.mark.processes
def test_archives_that_a_script_leaves_open_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "whole").write_text("text")
    ended = run_rank(f"import os; os.chdir({str(tmp_path)!r}){ARCHIVES}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    with zipfile.ZipFile(tmp_path / "a.zip") as packed, tarfile.open(tmp_path / "a.tgz") as streamed:
        assert (packed.read("name"), packed.read("part"), streamed.getnames()) == (b"text", b"a part", ["whole"])
    with shelve.open(str(tmp_path / "shelf")) as shelf:
        assert shelf["steps"] == [1, 2]


SLOWLY_DESTROYED = """
import tarfile, time
import torch.distributed as dist
from ddp_trainer.contract import process_end

class Slow:
    def __init__(self):
        self.file = open("slow.tar", "wb")

    def write(self, data):
        time.sleep(0.8)
        return self.file.write(data)

    def tell(self):
        return self.file.tell()

process_end.LEAVE_SECONDS = 0.3
dist.init_process_group("gloo")
destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (time.sleep(0.6), destroy())
tar = tarfile.open(fileobj=Slow(), mode="w")
tar.add("whole")
"""


@pytest.mark.processes
def test_an_archive_is_finished_once_where_groups_take_longer_to_be_destroyed(tmp_path: Path) -> None:
    (tmp_path / "whole").write_text("text")
    ended = run_rank(f"import os; os.chdir({str(tmp_path)!r}){SLOWLY_DESTROYED}", tmp_path)
    assert ended.returncode == 0, ended.stderr
    with tarfile.open(tmp_path / "slow.tar") as found:
        assert found.getnames() == ["whole"]
    assert (tmp_path / "slow.tar").stat().st_size % tarfile.RECORDSIZE == 0, "with its end"


DESTRUCTED = """
class Video:
    def __del__(self):
        print("finished", flush=True)

video = Video()
"""


@pytest.mark.parametrize("rest", ["", "def function(): pass", "import gc; gc.freeze()", "raise ValueError"])
@pytest.mark.processes
def test_what_only_a_destructor_finishes_is_finished(rest: str, tmp_path: Path) -> None:
    ended = run_rank(f"{DESTRUCTED}\n{rest}", tmp_path)
    assert ended.stdout == "finished\n", ended.stderr


@pytest.mark.processes
def test_a_script_has_no_future_statements_but_its_own(tmp_path: Path) -> None:
    script = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    rate: float = 0.1\n"
    ended = run_rank(f"{script}print(dataclasses.fields(C)[0].type)", tmp_path)
    assert ended.stdout == "<class 'float'>\n", ended.stderr


UPLOADS = """
import io, time
import torch.distributed as dist
from ddp_trainer.contract import process_end

process_end.LEAVE_SECONDS = 0.3
dist.init_process_group("gloo")

class Upload(io.RawIOBase):
    def close(self):
        if not self.closed:
            time.sleep(1.5)
            print("uploaded", flush=True)
        super().close()

upload = Upload()
upload.itself = upload
"""


@pytest.mark.processes
def test_a_file_may_take_its_time_once_the_groups_are_destroyed(tmp_path: Path) -> None:
    ended = run_rank(UPLOADS, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "uploaded\n"), ended.stderr


GOES_ON = {
    "a thread": """
def late():
    time.sleep(0.5)
    pickle.dumps(Item())
    print("done", flush=True)

threading.Thread(target=late).start()
""",
    "a pool of processes": """
pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
pool.submit(time.sleep, 0.5)
pool.submit(taken, Item()).add_done_callback(lambda future: print(future.result(), flush=True))
""",
    "an exit handler": """
atexit.register(lambda: print(len(pickle.dumps(Item())) and "done", flush=True))
""",
}


@pytest.mark.parametrize("what", GOES_ON)
@pytest.mark.processes
def test_what_goes_on_after_the_last_line_still_finds_the_classes_of_the_script(what: str, tmp_path: Path) -> None:
    begins = """
import atexit, concurrent.futures, multiprocessing, pickle, threading, time

class Item:
    pass

def taken(item):
    return "done"
"""
    ended = run_rank(begins + GOES_ON[what], tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.processes
def test_so_does_a_module(tmp_path: Path) -> None:
    begins, ends = (
        "import pickle, sys, threading, time\nclass Item: pass\n",
        "if __name__ == '__main__':\n    sys.exit(0)",
    )
    (tmp_path / "late.py").write_text(begins + GOES_ON["a thread"] + ends)
    ended = run_rank(f"import os\nos.chdir({str(tmp_path)!r})", tmp_path, "module", "late")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.parametrize("last_line", ["", "raise ValueError"])
@pytest.mark.processes
def test_a_pool_that_is_left_open_does_not_keep_the_rank(last_line: str, tmp_path: Path) -> None:
    script = """
import multiprocessing
pool = multiprocessing.get_context("fork").Pool(2)
print(pool.map(abs, range(-3, 3)), flush=True)
"""
    ended = run_rank(script + last_line, tmp_path)
    assert ended.returncode == (1 if last_line else 0), ended.stderr
    assert ended.stdout == "[3, 2, 1, 0, 1, 2]\n"


@pytest.mark.processes
def test_so_they_have_where_an_attached_script_leaves_as_preempted_under_plain_torchrun(tmp_path: Path) -> None:
    leaves = f"from ddp_trainer.rank.stop_request import leave_as_preempted\nleave_as_preempted(3){UNCLOSED}"
    (tmp_path / "read").write_text("as it was")
    own = {**os.environ, "PYTHONPATH": str(ROOT / "trainer_image")}
    ended = subprocess.run([sys.executable, "-c", leaves], env=own, cwd=tmp_path, timeout=120)
    assert ended.returncode == 143
    assert (tmp_path / "text").read_text().split() == ["1,2"]
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"packed"


@pytest.mark.parametrize(("last_line", "code"), [("sys.exit(3)", 3), ("raise ValueError('loss is NaN')", 1)])
@pytest.mark.processes
def test_a_rank_that_failed_keeps_its_exit_code(last_line: str, code: int, tmp_path: Path) -> None:
    ended = run_rank(SCRIPT + last_line, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert "exit handlers ran" in ended.stdout


@pytest.mark.processes
def test_a_group_that_cannot_be_destroyed_does_not_keep_a_rank_that_is_done(tmp_path: Path) -> None:
    ended = run_rank(SCRIPT + "dist.destroy_process_group = lambda: time.sleep(600)", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "exit handlers ran" in ended.stdout


HELPERS = """
import multiprocessing, os, sys, time
from pathlib import Path
from ddp_trainer.contract import unfinished

unfinished.HELPER_SECONDS = 0.4
unfinished.SAY_SECONDS = 0.5
context = multiprocessing.get_context("fork")

def upload(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(100_000))
    Path(sys.argv[0]).with_name("uploaded").touch()

def serve():
    time.sleep(1000)

"""


@pytest.mark.processes
def test_a_process_that_works_is_waited_for_and_one_that_only_waits_is_ended(tmp_path: Path) -> None:
    script = """
context.Process(target=upload, args=(1.5,), name="upload").start()
context.Process(target=serve, name="server").start()
"""
    ended = run_rank(HELPERS + script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "uploaded").exists()
    assert "the script is done; waiting for processes that it started: upload (" in ended.stderr
    assert "the script is done; ended the processes that it left: server (" in ended.stderr
    assert "upload" not in ended.stderr.split("ended the processes")[1]
    assert read_outcomes(tmp_path / "run")[0]["cut"] is None


@pytest.mark.processes
def test_work_that_is_cut_off_after_a_success_is_on_record(tmp_path: Path) -> None:
    script = """
unfinished.WORK_SECONDS = 0.3
context.Process(target=upload, args=(1000,), name="upload").start()
"""
    ended = run_rank(HELPERS + script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (outcome,) = read_outcomes(tmp_path / "run")
    assert outcome["reason"] == "Completed"
    assert re.fullmatch(r"its processes upload \(\d+\), still at work 0.3 s after the script", outcome["cut"])


def test_what_looks_at_this_process_does_not_count_as_its_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    before, began = unfinished.used_here(), time.thread_time()
    while time.thread_time() < began + 0.3:
        (tmp_path / "file").read_bytes()
    assert not is_active(before, unfinished.used_here(), 10.0)


def test_an_exit_handler_waits_for_threads_of_gloo_that_still_work() -> None:
    begun, done, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, GLOO_THREADS.encode(), 0, 0, 0)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)  # in C, as a collective; some tenths of a second
        done.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    await_gloo()
    assert done.is_set()
    over.set()
    thread.join()


def test_a_thread_of_gloo_that_never_rests_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(process_end, "_thread_states", lambda name: iter("SR"))
    await_gloo()
