"""What makes a run repeat bit for bit: seen on torch's own switches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cuda

from ddp_trainer.train.randomness import make_deterministic


@pytest.fixture
def attention() -> Iterator[None]:
    """The switches of attention, on here and as they were after."""
    switches = [
        (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
    ]
    deterministic = torch.are_deterministic_algorithms_enabled()
    for switch, _ in switches:
        switch(True)
    yield
    for switch, before in switches:
        switch(before)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_attention_is_fused_only_where_that_repeats(attention, monkeypatch, has_cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert cuda.math_sdp_enabled()
    fused = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    assert fused == [not has_cuda] * 3
