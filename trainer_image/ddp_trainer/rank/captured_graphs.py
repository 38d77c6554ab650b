"""What a script does while it captures a CUDA graph: nothing is computed then, but each time that it is replayed.

A script that captures a whole step calls `backward()` and `step()` once, for the capture, and `replay()` from then on.
Values that lie on the device cannot be read meanwhile: to wait for it ends the capture with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from ddp_trainer.contract.heartbeat import is_capturing

Action = Callable[[], None]

_captured: list[tuple[Action | None, Action | None]] = []
"""Actions for the graph that is being captured."""
_of_graphs: WeakKeyDictionary[Any, list[tuple[Action | None, Action | None]]] = WeakKeyDictionary()


def at_replays(*, before: Action | None = None, after: Action | None = None) -> bool:
    """While a graph is captured: call `before` and `after` around each of its replays, and return True. Else False."""
    if not is_capturing():
        return False
    _install()
    _captured.append((before, after))
    return True


def _install() -> None:
    torch: Any = sys.modules["torch"]
    for kind in (torch.cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)):
        if kind is not None and not getattr(kind.replay, "calls_actions", False):
            _wrap(kind)


def _wrap(kind: Any) -> None:
    end, replay = kind.capture_end, kind.replay

    @wraps(end)
    def capture_end(graph: Any) -> None:
        actions, _captured[:] = list(_captured), []
        end(graph)
        _of_graphs[graph] = actions

    @wraps(replay)
    def replay_with_actions(graph: Any) -> None:
        actions = _of_graphs.get(graph, ())
        for before, _ in actions:
            if before is not None:
                before()
        replay(graph)
        for _, after in actions:
            if after is not None:
                after()

    replay_with_actions.calls_actions = True  # type: ignore[attr-defined]
    kind.capture_end, kind.replay = capture_end, replay_with_actions
