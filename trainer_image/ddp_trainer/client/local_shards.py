"""The shards that one rank holds, as a state that a rank of the same place in another pod can take over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddp_trainer.snapshots.codec.loading import load_into


class LocalShards:
    """What this rank holds of a model that is sharded in its pod, and of its optimizer, as plain tensors: for the rank
    of the same place in another pod.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> Mapping[str, Any]:
        state = self._optimizer.state_dict()
        return {
            "model": {name: _local(value) for name, value in self._model.state_dict().items()},
            "groups": state["param_groups"],
            "whole": _those(state["state"], sharded=False),
            "sharded": _those(state["state"], sharded=True),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, value in self._model.state_dict().items():
                _local(value).copy_(state_dict["model"][name])
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        states: dict[int, dict[str, Any]] = {int(index): dict(of) for index, of in state_dict["whole"].items()}
        for index, of in state_dict["sharded"].items():
            states.setdefault(int(index), {}).update(
                {key: _as_shard_of(parameters[int(index)], local) for key, local in of.items()}
            )
        load_into(self._optimizer, {"state": states, "param_groups": state_dict["groups"]})


def _those(states: Mapping[int, Mapping[str, Any]], *, sharded: bool) -> dict[int, dict[str, Any]]:
    return {
        index: {key: _local(value) for key, value in of.items() if isinstance(value, DTensor) is sharded}
        for index, of in states.items()
    }


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _as_shard_of(parameter: Tensor, local: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
