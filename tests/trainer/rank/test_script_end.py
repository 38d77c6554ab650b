"""What a script leaves open or under way when it ends comes to the end that it has under Python alone."""

from __future__ import annotations

import gzip
import os
import shelve
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS
from tests.trainer.contract.one_rank import run_rank

from ddp_trainer.contract import outcomes
from ddp_trainer.contract.outcomes import read_outcomes

ROOT = Path(__file__).parents[3]


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
    ended = run_rank(f"import os; os.chdir({str(tmp_path)!r}){SLOWLY_DESTROYED}", tmp_path, has_torch=True)
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
    ended = run_rank(UPLOADS, tmp_path, has_torch=True)
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


SPAWNS = """
import concurrent.futures, multiprocessing

class Item:
    pass

if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(type(pool.submit(Item).result()) is Item)
"""


@pytest.mark.processes
def test_an_object_that_comes_back_from_a_spawned_process_is_of_a_class_of_the_script(tmp_path: Path) -> None:
    ended = run_rank(SPAWNS, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.processes
def test_a_manager_that_is_left_open_does_not_keep_the_rank(tmp_path: Path) -> None:
    ended = run_rank("import multiprocessing\nmanager = multiprocessing.get_context('fork').Manager()", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


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
    ended = subprocess.run([sys.executable, "-c", leaves], env=own, cwd=tmp_path, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 143
    assert (tmp_path / "text").read_text().split() == ["1,2"]
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"packed"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("last_lines", "reasons"),
    [
        ("os._exit(0)", ["Completed"]),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); signal.raise_signal(signal.SIGTERM)", ["Completed"]),
        ("threading.Thread(target=os._exit, args=[0]).start(); time.sleep(600)", ["Completed"]),
        ("if os.fork() == 0:\n    os._exit(0)\nos.wait()\nos.kill(os.getpid(), signal.SIGKILL)", []),
        ("os._exit(3)", []),
        ("import atexit; atexit.register(os._exit, 0); raise ValueError", ["WorkerException"]),
    ],
    ids=["last line", "handler of SIGTERM", "thread", "child", "failure", "exit handler"],
)
def test_a_script_that_leaves_by_os_exit_with_0_has_a_record(
    last_lines: str, reasons: list[str], tmp_path: Path
) -> None:
    """The launcher ends the ranks that are still at work where one of the pod has ended without a record."""
    run_rank(f"import os, signal, threading, time\n{last_lines}", tmp_path)
    assert [outcome["reason"] for outcome in read_outcomes(tmp_path / "run")] == reasons


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.processes
def test_what_a_script_exits_with_is_printed_as_python_does(tmp_path: Path) -> None:
    ended = run_rank("import sys; sys.exit(ValueError('there is no lr.json'))", tmp_path)
    (outcome,) = read_outcomes(tmp_path / "run")
    assert (ended.returncode, ended.stderr) == (1, "there is no lr.json\n")
    assert (outcome["reason"], outcome["message"]) == ("WorkerException", "there is no lr.json")


def test_what_a_script_exits_with_may_have_no_text() -> None:
    assert outcomes.outcome_of(SystemExit(Unprintable()), rank=0, local_rank=0, pid=1)["exitCode"] == 1


ONLY_RANK_0_PRINTS = """
import builtins
builtins.print = lambda *values, **options: None
"""


@pytest.mark.parametrize(
    ("last_line", "said"),
    [
        ("raise ValueError('bad sample 17')", "ValueError: bad sample 17\n"),
        ("raise SystemExit('no data for this rank')", "no data for this rank\n"),
        ("from ddp_trainer.contract.exit_codes import UserError; raise UserError('no')", "ddp_trainer: no\n"),
    ],
)
@pytest.mark.processes
def test_a_rank_whose_script_has_silenced_print_still_says_what_ended_it(
    last_line: str, said: str, tmp_path: Path
) -> None:
    ended = run_rank(ONLY_RANK_0_PRINTS + last_line, tmp_path)
    assert ended.stderr.endswith(said)


HOOK = """
import sys, traceback

def hook(kind, error, trace):
    print(kind.__name__, error, traceback.extract_tb(trace)[0].line, flush=True)
    {last}

sys.excepthook = hook
"""
GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("last", "before", "said"),
    [
        ("sys.exit(7)", "", ""),
        ("raise KeyError(3)", "", "\nKeyError: 3\n"),
        ("", GROUP + "dist.destroy_process_group()\n" + GROUP, ""),
    ],
    ids=["ends by sys.exit", "fails", "below that of torch"],
)
@pytest.mark.processes
def test_the_hook_of_a_script_sees_the_exception_that_ends_it(
    last: str, before: str, said: str, tmp_path: Path
) -> None:
    script = HOOK.format(last=last) + before + "raise ValueError('bad sample 17')"
    ended = run_rank(script, tmp_path, has_torch=bool(before))
    (outcome,) = read_outcomes(tmp_path / "run")
    assert ended.stdout == "ValueError bad sample 17 raise ValueError('bad sample 17')\n"
    assert (ended.returncode, outcome["exitCode"]) == (1, 1)
    assert ended.stderr.count("\nValueError: bad sample 17\n") == 1
    assert ended.stderr.endswith(said), ended.stderr


@pytest.mark.parametrize("last_line", ["sys.exit(3)", "sys.exit()", GROUP + "raise ValueError"])
@pytest.mark.processes
def test_no_hook_sees_the_exit_of_a_script_and_that_of_torch_repeats_no_traceback(
    last_line: str, tmp_path: Path
) -> None:
    hook = "" if "raise" in last_line else HOOK.format(last="")
    ended = run_rank(f"import sys\n{hook}{last_line}", tmp_path, has_torch=GROUP in last_line)
    assert ended.stdout == ""
    assert ended.stderr.count("Traceback") == last_line.count("raise")


RUN_AND_REPORT = """
import sys, traceback

def run_and_report(func):
    try:
        return func()
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(1)
"""
WITH_HYDRA = """
from pathlib import Path
from ddp_trainer.contract.exit_codes import RollBack
from ddp_trainer.rank.failures import on_failure
from hydra._internal.utils import run_and_report

def main():
    raise {error}

on_failure(lambda error: Path({seen!r}).write_text(str(error)))
run_and_report(main)
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [("MemoryError('bad sample 17')", "OutOfMemory"), ("RollBack('bad sample 17')", "LossNotFinite")],
)
@pytest.mark.processes
def test_what_ends_a_script_with_hydra_is_its_exception_and_not_the_exit_that_follows(
    error: str, reason: str, tmp_path: Path
) -> None:
    """Hydra prints what it catches, and leaves by `sys.exit(1)`: an emergency snapshot was left out, and a loss that is
    NaN was not rolled back.
    """
    package = tmp_path / "hydra/_internal"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "utils.py").write_text(RUN_AND_REPORT)
    ended = run_rank(WITH_HYDRA.format(error=error, seen=str(tmp_path / "seen")), tmp_path)
    (outcome,) = read_outcomes(tmp_path / "run")
    assert (ended.returncode, outcome["exitCode"], outcome["reason"]) == (1, 1, reason)
    assert outcome["message"] == (tmp_path / "seen").read_text() == "bad sample 17"
    assert ended.stderr.count("Traceback") == 1, ended.stderr
