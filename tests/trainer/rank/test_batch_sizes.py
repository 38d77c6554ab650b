"""How many samples a batch has: tensors, and what else a script may put into one."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from ddp_trainer.rank.batch_sizes import batch_size

with warnings.catch_warnings(action="ignore"):  # it is a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ([torch.ones(4, 2), torch.ones(4)], 4),
        ({"input_ids": torch.ones(3, 7), "labels": torch.ones(3)}, 3),
        ({"names": ["a", "b"], "x": torch.ones(2, 2)}, 2),
        (torch.tensor(1.0), None),
        ("text", None),
        (object(), None),
        (NESTED, None),
        ((NESTED, torch.ones(2)), 2),
        (SimpleNamespace(shape="circle"), None),
        (SimpleNamespace(shape="3d"), None),
        (SimpleNamespace(shape=lambda: (4, 2)), None),
    ],
)
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_tensor(batch: object, size: int | None) -> None:
    assert batch_size(batch) == size


@pytest.mark.parametrize(
    ("batch", "asked_for", "size"),
    [
        ([torch.ones(1, 2), torch.ones(1)], 2, 1),
        ([[torch.ones(3, 2), torch.ones(3)], torch.ones(3)], 4, 3),
        ({"input_ids": torch.ones(1, 99), "text": ["a", "b"]}, 8, 1),
        ((torch.ones(5), NESTED), 2, 5),
        ("text", 4, None),
    ],
    ids=["the last one", "the last one, nested", "packed", "of an unusual kind", "no tensor"],
)
def test_the_first_tensor_counts_where_nothing_has_as_many_samples_as_were_asked_for(
    batch: object, asked_for: int, size: int | None
) -> None:
    assert batch_size(batch, asked_for) == size


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (([torch.ones(3, 4)], [{"boxes": torch.ones(7, 4)}]), 1),
        ({"inputs": [torch.ones(3, 4)], "data_samples": [object()], "epoch": 5}, 1),
        ((torch.ones(32, 3), torch.ones(1)), 32),
        ({"image": torch.ones(32, 3), "files": ["a.tar"]}, 32),
    ],
    ids=["torchvision", "mmengine", "a weight", "a file"],
)
def test_a_batch_is_one_sample_only_where_no_part_is_longer(batch: object, size: int) -> None:
    """`DataLoader(dataset, collate_fn=operator.itemgetter(0))`, with the batch_size of 1 that is the default."""
    assert batch_size(batch, asked_for=1) == size


def test_a_part_of_an_unusual_kind_does_not_hide_the_others() -> None:
    assert batch_size((torch.ones(5), NESTED, ["a", "b"]), asked_for=2) == 2
