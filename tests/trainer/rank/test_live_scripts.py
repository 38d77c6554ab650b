"""With restart.scope Live, a script that does not call `attach_live` takes no step and ends with an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.optim import SGD

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank import live_scripts


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    live_scripts.arrived()


def step() -> float:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    SGD([weight], lr=0.5).step()
    return float(weight.detach())


def test_a_script_whose_ranks_do_not_recover_live_is_left_alone() -> None:
    assert step() == 0.5
    assert live_scripts.missing() is None


def test_a_step_is_refused_until_the_script_has_attached() -> None:
    live_scripts.expect()
    with pytest.raises(UserError, match=r"attach_live.*InPlace"):
        step()
    assert "attach_live" in str(live_scripts.missing())
    live_scripts.arrived()
    assert step() == 0.5
    assert live_scripts.missing() is None
