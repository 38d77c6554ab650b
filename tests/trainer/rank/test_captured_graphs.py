"""A script that captures whole steps in a CUDA graph: what it replays counts, and what it captures does not.

There is no CUDA here: the graph of these tests takes the step again, as a device would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_trainer.contract.heartbeat import Heartbeat, heartbeat_dir, read_heartbeats
from ddp_trainer.rank.observe import close_observer, observe
from ddp_trainer.snapshots.boundary import before_update


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: Callable[[], None] = lambda: None

    def capture_end(self) -> None:
        """As torch's."""

    def replay(self) -> None:
        self.work()


@pytest.fixture(params=["cuda.CUDAGraph", "accelerator.Graph"])
def capturing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context in which torch says that a graph is being captured."""
    module, _, name = request.param.partition(".")
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    for owner, kind in ((torch.cuda, "CUDAGraph"), (torch.accelerator, "Graph")):
        # torch 2.10 has no second one
        monkeypatch.setattr(owner, kind, type(kind, (Graph,), dict(vars(Graph))), raising=False)

    @contextmanager
    def capture() -> Iterator[Any]:
        graph = getattr(getattr(torch, module), name)()
        state.capturing = True
        yield graph
        graph.capture_end()
        state.capturing = False

    return capture


def test_steps_are_those_that_are_replayed(tmp_path: Path, capturing: Callable[[], Any]) -> None:
    heartbeat_dir(tmp_path).mkdir()
    heartbeat = Heartbeat(heartbeat_dir(tmp_path))
    observe(heartbeat, world_size=2)
    try:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        static = torch.zeros(())

        def train() -> None:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()

        for _ in range(3):
            train()
        with capturing() as graph:
            loss = static.clone().requires_grad_()
            loss.backward()
            optimizer.step()
        assert heartbeat.loss is not None
        for number in range(5):
            graph.work = lambda number=number: loss.data.fill_(number + 0.5)
            graph.replay()
        heartbeat.flush()
    finally:
        close_observer()
    (beat,) = read_heartbeats(tmp_path)
    assert (beat["step"], beat["phase"], beat["loss"]) == (8, "train", 4.5)


def test_a_graph_that_steps_changes_the_states_when_it_is_replayed(capturing: Callable[[], Any]) -> None:
    updates: list[str] = []
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    before_update(optimizer, lambda: updates.append("begins"))
    with capturing() as graph:
        optimizer.step()
    assert updates == []
    graph.work = lambda: updates.append("replayed")
    graph.replay()
    assert updates == ["begins", "replayed"]
    optimizer.step()
    assert updates == ["begins", "replayed", "begins"]


def test_a_loss_on_the_device_is_not_read_while_a_graph_is_captured(
    tmp_path: Path, capturing: Callable[[], Any]
) -> None:
    class OnDevice:
        device = torch.device("cuda", 0)

        def __float__(self) -> float:
            assert not torch.cuda.is_current_stream_capturing(), "operation not permitted when stream is capturing"
            return 2.5

    heartbeat = Heartbeat(tmp_path)
    with capturing():
        heartbeat.step(step=1, loss=OnDevice())
        assert heartbeat.loss is None
    heartbeat.flush()
    assert heartbeat.loss == 2.5
