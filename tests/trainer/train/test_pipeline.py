"""What a pipeline cannot cut into stages."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.tasks.digits import Digits
from ddp_trainer.train.strategies.pipeline import check_whole, shared_names


def tied() -> nn.Sequential:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second, nn.Linear(4, 4), nn.Linear(4, 4))


def used_twice() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU())


@pytest.mark.parametrize(
    ("model", "stages", "index", "refused"),
    [
        (tied, 2, 0, False),
        (tied, 2, 1, False),
        (tied, 4, 0, True),
        (tied, 4, 1, True),
        (tied, 4, 2, False),
        (used_twice, 2, 0, True),
        (used_twice, 2, 1, True),
    ],
)
def test_a_parameter_that_would_be_in_several_stages_is_refused(model, stages: int, index: int, refused: bool) -> None:
    whole = model()
    shared = shared_names(whole)
    stage = Digits().stage(whole, index, stages)
    if not refused:
        check_whole(shared, stage)
        return
    with pytest.raises(UserError, match=r"^--strategy pipeline: 0\.weight and \d\.weight are one parameter"):
        check_whole(shared, stage)
