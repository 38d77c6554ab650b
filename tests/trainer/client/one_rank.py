"""A model that is trained on one rank."""

from __future__ import annotations

import torch
from torch import nn


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss
