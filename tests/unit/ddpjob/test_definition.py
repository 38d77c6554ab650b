"""`ddpjob.DDPJob`: what becomes of a script or a function, and what is refused before anything is sent."""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import linecache
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import ddpjob
from ddp_trainer import call
from ddp_trainer.contract.exit_codes import UserError
from ddpjob import BadJob, DDPJob, definition
from ddpjob_operator.cli.job_file import read_job
from ddpjob_operator.submit.pack import unpack
from ddpjob_operator.submit.send import Sent

MODULE = """
def train(lr, layers=2):
    with open("called.txt", "w") as file:
        file.write(f"{lr} {layers}")

class Group:
    @staticmethod
    def train():
        pass

nested = (lambda: lambda: None)()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "work.py").write_text(MODULE)
    (tmp_path / "train.py").write_text("print(1)")
    return tmp_path


@pytest.fixture
def function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_package", raising=False)
    monkeypatch.delitem(sys.modules, "own_package.work", raising=False)
    found: Callable[..., Any] = importlib.import_module("own_package.work").train
    return found


def test_a_script_is_the_job_that_the_command_submits(folder: Path) -> None:
    links = {"wandb": "https://wandb.ai/team/runs/abc"}
    job = DDPJob(script="train.py", nodes=2, args=["--lr", "3e-4"], folder=folder, env={"A": "1"}, links=links)
    (folder / "job.yaml").write_text(job.to_yaml())
    (folder / ".ddpjobignore").write_text("job.yaml\n")
    assert read_job(str(folder / "job.yaml")).content == job.submission().content
    assert job.submission().job.size_in_words == "2 nodes x 1 rank = 2 ranks"
    assert job.content()["metadata"]["annotations"] == {"links.training.ddpjob.io/wandb": links["wandb"]}


def test_a_script_may_be_named_by_its_file_on_this_machine(folder: Path) -> None:
    """As `DDPJob(script=__file__)` does; another absolute path is one of the image or of the volume."""
    found = [
        DDPJob(script=script, folder=folder).submission().content["spec"]["entrypoint"]["script"]
        for script in (str(folder / "train.py"), f"{folder}/own_package/work.py", "/workspace/train.py")
    ]
    assert found == ["train.py", "own_package/work.py", "/workspace/train.py"]


def test_an_owner_is_in_the_file_and_the_user_who_would_send_it_is_not(folder: Path) -> None:
    job = DDPJob(script="train.py", folder=folder, owner="team-vision")
    assert job.submission().content["metadata"]["annotations"] == {"training.ddpjob.io/owner": "team-vision"}
    assert yaml.safe_load(job.to_yaml())["metadata"] == job.content()["metadata"]
    assert "annotations" not in DDPJob(script="train.py", folder=folder).content()["metadata"]


def test_further_fields_win(folder: Path) -> None:
    spec = {"nodes": 3, "snapshots": {"every": "60seconds"}}
    found = DDPJob(script="train.py", folder=folder, spec=spec).submission().job.spec
    assert (found.nodes, found.snapshots.every) == (3, "60seconds")


def test_a_function_is_called_by_every_rank(
    folder: Path, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = DDPJob(function=function, kwargs={"lr": 0.1}, folder=folder).submission()
    spec = submission.content["spec"]
    assert spec["entrypoint"] == {"module": call.MODULE}
    assert submission.job.name == "train"
    monkeypatch.chdir(folder)
    call.main(spec["args"])
    assert (folder / "called.txt").read_text() == "0.1 2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "script, function: name one of them"),
        ({"script": "trian.py"}, "did you mean train.py?"),
        ({"script": "train.py", "name": "A b", "nodes": 0}, "metadata.name: 'A b' is not a valid name"),
        ({"script": "train.py", "nodes": 0}, "spec.nodes: 0 is too small"),
        ({"script": "train.py", "spec": {"node": 1}}, "spec.node: is not a field of a DDPJob; did you mean nodes?"),
        ({"script": "train.py", "links": {"a": "ftp://x"}}, "links: a=ftp://x: this is no URL that begins with http"),
        ({"script": "train.py", "owner": "x" * 65}, "owner: has 65 characters; write at most 64"),
        ({"function": json.dumps}, "json.py is not in"),
        ({"function": lambda: None}, "cannot be imported; define it at the top of a file"),
        ({"function": functools.partial(json.dumps, indent=1)}, "a function of a file, and what it takes in kwargs"),
    ],
)
def test_what_cannot_run_is_refused_with_every_problem(folder: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadJob) as refusal:
        DDPJob(folder=folder, **arguments).submission()
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("runs_as", "below", "target"),
    [
        ("own_package.work", "", "own_package.work:train"),
        (None, "own_package", "work:train"),
        ("__main__", "own_package", "work:train"),
    ],
    ids=["python -m", "a script", "a script under a profiler"],
)
def test_a_function_of_the_program_that_runs_has_the_name_by_which_ranks_import_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runs_as: str | None, below: str, target: str
) -> None:
    program = ModuleType("__main__")
    program.__file__ = str(folder / "own_package" / "work.py")
    program.__spec__ = None if runs_as is None else ModuleSpec(runs_as, None)
    exec(compile(MODULE, program.__file__, "exec"), program.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", program)
    submission = DDPJob(function=program.__dict__["train"], folder=folder / below).submission()
    assert submission.content["spec"]["args"] == [target, "{}"]


def of_cell(monkeypatch: pytest.MonkeyPatch, source: str) -> Callable[..., Any]:
    """The function `train` of a notebook cell, as IPython compiles it and keeps its source."""
    notebook = ModuleType("__main__")
    file = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setitem(linecache.cache, file, (len(source), None, source.splitlines(keepends=True), file))
    exec(compile(source, file, "exec"), notebook.__dict__)
    found: Callable[..., Any] = notebook.__dict__["train"]
    return found


CELL = """\
import math
from pathlib import Path

rate = math.pi

def train(lr: Path, layers=2):
    from own_package import work
    import sys
    def inner():
        return [str(layers) for layers in (layers, sys.maxsize)]
    with open("called.txt", "w") as file:
        file.write(f"{lr} {layers} {work.__name__} {len(inner())}")
"""


def test_a_function_of_a_notebook_cell_is_sent_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name for path in folder.iterdir()}
    submission = DDPJob(function=of_cell(monkeypatch, CELL), kwargs={"lr": 0.1}, folder=folder).submission()
    assert {path.name for path in folder.iterdir()} == before
    assert submission.code is not None
    assert submission.job.name == "train"
    (tmp := folder / "unpacked").mkdir()
    for file in unpack(submission.code.parts):
        (tmp / file.path).parent.mkdir(exist_ok=True)
        (tmp / file.path).write_bytes(file.content)
    monkeypatch.syspath_prepend(tmp)
    monkeypatch.chdir(tmp)
    for name in ("own_package", "own_package.work", "ddpjob_cell"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    call.main(submission.content["spec"]["args"])
    assert (tmp / "called.txt").read_text() == "0.1 2 own_package.work 2"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("rate = 1\nimport math\ndef train():\n    return rate, math.pi, len([])\n", "train uses math, rate of"),
        ("rate = 1\ndef train(lr=rate):\n    pass\n", "train uses rate of the notebook"),
        ("rate = 1\ndef train():\n    def inner():\n        return rate\n", "train uses rate of the notebook"),
        ("def same(f):\n    return f\n@same\ndef train():\n    pass\n", "train uses same of the notebook"),
        ("def train():\n    get_ipython().run_line_magic('pwd', '')\n", "train uses get_ipython of the notebook"),
        ("class A:\n    def train():\n        pass\ntrain = A.train\n", "A.train cannot be imported"),
    ],
)
def test_a_function_of_a_cell_that_uses_what_is_not_sent_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)
    with pytest.raises(BadJob, match=said):
        DDPJob(function=of_cell(monkeypatch, source), folder=folder).submission()


def test_a_function_whose_source_is_not_known_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = of_cell(monkeypatch, CELL)
    monkeypatch.delitem(linecache.cache, function.__code__.co_filename)
    with pytest.raises(BadJob, match="define it at the top of a file in the folder"):
        DDPJob(function=function, folder=folder).submission()


def test_a_file_with_the_name_of_the_module_of_cells_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ddpjob_cell.py").write_text("")
    with pytest.raises(BadJob, match=r"ddpjob_cell\.py: is the name of a file that is added; rename yours"):
        DDPJob(function=of_cell(monkeypatch, CELL), folder=folder).submission()


def test_a_function_of_a_cell_has_no_yaml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadJob, match="write it into a file"):
        DDPJob(function=of_cell(monkeypatch, CELL), folder=folder).to_yaml()


def test_arguments_that_json_has_not_are_refused(folder: Path, function: Callable[..., Any]) -> None:
    with pytest.raises(BadJob, match="pass text, numbers, lists and dicts"):
        DDPJob(function=function, kwargs={"model": object()}, folder=folder).submission()


@pytest.mark.parametrize("argv", [["own_package.work:trian", "{}"], ["own_package.work:train"]])
def test_a_rank_says_which_function_is_missing(function: Callable[..., Any], argv: list[str]) -> None:
    with pytest.raises(UserError, match=r"own_package\.work"):
        call.main(argv)


def test_the_yaml_names_the_folder_and_not_what_is_in_it(folder: Path) -> None:
    assert yaml.safe_load(DDPJob(script="train.py", folder=folder).to_yaml())["spec"]["code"] == {"path": "."}


async def test_what_is_left_out_is_said_as_the_command_says_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that does not find its data on the cluster fails without a word of why."""

    class Connected:
        namespace = "ml"

    async def connect(**_: Any) -> Connected:
        return Connected()

    async def send(*_: Any, **__: Any) -> Sent:
        return Sent({"metadata": {"uid": "u"}}, 0, None)

    monkeypatch.setattr(definition, "connect", connect)
    monkeypatch.setattr(definition, "send", send)
    (folder / "train.bin").write_text("data")
    (folder / ".ddpjobignore").write_text("*.bin\n")
    job = await DDPJob(script="train.py", folder=folder).submit_async()
    assert (job.namespace, job.name) == ("ml", "train")
    assert capsys.readouterr().err.startswith("left out: train.bin: is ignored by git or .ddpjobignore")


ITSELF = """
from ddpjob import DDPJob, JobFailed

def train(lr):
    with open("called.txt", "w") as file:
        file.write(str(lr))

if __name__ == "__main__":
    DDPJob(function=train).submit()
"""


@pytest.fixture(params=["no client", "a client without its extra"])
def image(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ranks import, with what an image has of the client."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "itself", raising=False)
    monkeypatch.setenv(call.NO_CLIENT, "")
    if request.param == "no client":
        monkeypatch.setitem(sys.modules, "ddpjob", None)
        return tmp_path
    monkeypatch.delitem(sys.modules, "ddpjob")
    missing = "aiohttp: not installed for python; install ddpjob[cli]"
    (tmp_path / "ddpjob.py").write_text(f'raise ModuleNotFoundError("{missing}", name="aiohttp")')
    return tmp_path


def test_ranks_import_a_file_that_submits_its_own_function(image: Path) -> None:
    (image / "itself.py").write_text(ITSELF)
    call.main(["itself:train", '{"lr": 0.1}'])
    assert (image / "called.txt").read_text() == "0.1"


@pytest.mark.parametrize("used", ["DDPJob(script='train.py').submit()", "Job.get('train')"])
def test_a_file_that_submits_wherever_it_is_imported_is_refused_on_the_ranks(image: Path, used: str) -> None:
    (image / "itself.py").write_text(f"from ddpjob import DDPJob, Job\n{used}\n")
    with pytest.raises(UserError, match="write that below `if __name__ == '__main__':`"):
        call.main(["itself:train", '{"lr": 0.1}'])


DEFINED = """
from ddpjob import DDPJob, JobFailed

def train():
    try:
        raise ValueError("of the training")
    except JobFailed:
        pass

job = DDPJob(function=train, nodes=2)
"""


def test_a_job_may_be_defined_where_a_file_is_imported_and_its_failures_be_named(image: Path) -> None:
    (image / "itself.py").write_text(DEFINED)
    with pytest.raises(ValueError, match="of the training"):
        call.main(["itself:train", "{}"])


def test_a_process_that_a_rank_spawns_imports_the_file_too(image: Path) -> None:
    os.environ[call.NO_CLIENT] = "1"
    runpy.run_path(call.__file__, run_name="__mp_main__")
    (image / "itself.py").write_text(DEFINED)
    assert importlib.import_module("itself").job is not None


def test_what_a_file_raises_as_it_is_imported_is_not_a_missing_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "itself", raising=False)
    (tmp_path / "itself.py").write_text("import json\njson.no_such_name")
    with pytest.raises(AttributeError, match="no_such_name"):
        call.main(["itself:train", "{}"])


def test_what_else_an_image_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "itself", raising=False)
    (tmp_path / "itself.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        call.main(["itself:train", "{}"])


def test_ranks_know_all_that_the_client_has() -> None:
    assert set(call.OF_CLIENT) == set(ddpjob.__all__)
