"""The client in a notebook: the cells of a person in a real kernel of Jupyter, and a real API server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.api_server.harness import Cluster, Operator
from tests.support.waiting import PATIENCE_SECONDS, eventually_async

from ddpjob_operator.submit.config_maps import fetch
from ddpjob_operator.submit.pack import unpack

DEFINE = """\
def train(lr):
    from model import layers
    print(lr, layers)
"""
SUBMIT = """\
from ddpjob import DDPJob
job = DDPJob(
    function=train, kwargs={{"lr": 0.1}}, spec={{"podTemplate": {{"spec": {{"schedulerName": "none"}}}}}}
).submit(namespace="{namespace}")
"""
WATCH = "job.watch()"
TEXT, HTML = "text/plain", "text/html"


@dataclass(frozen=True, slots=True)
class Notebook:
    """Cells that one kernel executes."""

    client: NotebookClient

    async def execute(self, source: str) -> list[nbformat.NotebookNode]:
        """The outputs of a new cell. An exception in it fails the test, with the traceback of the kernel."""
        async with self.executing(source) as cell:
            pass
        return cell.outputs

    @asynccontextmanager
    async def executing(self, source: str, *tags: str) -> AsyncIterator[nbformat.NotebookNode]:
        """A new cell, whose outputs change during the block. At the end of the block the cell has ended."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)}))
        task = asyncio.create_task(self.client.async_execute_cell(cells[-1], len(cells) - 1))
        try:
            yield cells[-1]
            await task
        finally:
            task.cancel()

    async def interrupt(self) -> None:
        """As the button of a notebook does."""
        await self.client.km.interrupt_kernel()


@pytest.fixture
async def notebook(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Notebook]:
    """In a folder with a module; nothing of it is written elsewhere."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text("layers = 2")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=int(PATIENCE_SECONDS),
        startup_timeout=int(PATIENCE_SECONDS),
        resources={"metadata": {"path": str(folder)}},
    )
    async with client.async_setup_kernel():
        yield Notebook(client)


async def shows(cell: nbformat.NotebookNode, phase: str) -> None:
    async def shown() -> bool:
        return any(output.get("data", {}).get(TEXT) == f"train: {phase}" for output in cell.outputs)

    await eventually_async(shown, f"the cell shows {phase}", instead=lambda: json.dumps(cell.outputs, indent=1))


async def test_a_function_of_a_cell_is_submitted_and_one_output_follows_it_to_its_end(
    cluster: Cluster, operator: Operator, notebook: Notebook
) -> None:
    assert await notebook.execute(DEFINE) == []
    assert await notebook.execute(SUBMIT.format(namespace=cluster.namespace)) == []
    spec = (await cluster.job("train"))["spec"]
    assert spec["args"] == ["ddpjob_cell:train", '{"lr": 0.1}']
    sent = unpack(await fetch(cluster.client, cluster.namespace, spec["code"]["configMaps"]))
    files = {file.path: file.content.decode() for file in sent}
    assert files.keys() == {"ddpjob_cell.py", "model.py"}
    assert DEFINE in files["ddpjob_cell.py"]

    await cluster.gang_exists(nodes=1, job="train")
    async with notebook.executing(WATCH) as cell:
        await shows(cell, "Starting")
        (display,) = cell.outputs
        await cluster.runs("train-0-0")
        await shows(cell, "Running")
        await cluster.ends("train-0-0")
    assert cell.outputs[0] is display
    assert [output.output_type for output in cell.outputs] == ["display_data", "execute_result"]
    assert display.data[TEXT] == "train: Succeeded"
    assert re.search(r"<b>train</b> <b [^>]*>Succeeded</b>", display.data[HTML])
    assert cell.outputs[1].data[TEXT] == "<DDPJobStatus: Succeeded, attempt 0, restarts 0>"


async def test_an_interrupted_cell_leaves_the_job_as_it_is_and_the_client_goes_on(
    cluster: Cluster, operator: Operator, notebook: Notebook
) -> None:
    await notebook.execute(DEFINE)
    await notebook.execute(SUBMIT.format(namespace=cluster.namespace))
    pods = await cluster.gang_exists(nodes=1, job="train")
    await cluster.runs("train-0-0")
    async with notebook.executing(WATCH, "raises-exception") as cell:
        await shows(cell, "Running")
        await notebook.interrupt()
    assert [output.get("ename") for output in cell.outputs] == [None, "KeyboardInterrupt"]

    (answer,) = await notebook.execute("str(job.status.phase)")
    assert answer.data[TEXT] == "'Running'"
    assert "deletionTimestamp" not in (await cluster.job("train"))["metadata"]
    assert [pod["metadata"]["uid"] for pod in await cluster.pods()] == [pod["metadata"]["uid"] for pod in pods]
    async with notebook.executing(WATCH) as again:
        await shows(again, "Running")
        await cluster.ends("train-0-0")
    assert again.outputs[0].data[TEXT] == "train: Succeeded"
