"""What makes a run repeat bit for bit: seen on torch's own switches."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.backends import cuda

from ddp_trainer.train.randomness import (
    deterministic_backward,
    forget_cublas_workspace,
    give_up_fused_attention,
    lacks_deterministic_kernel,
    make_deterministic,
)


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


def fused() -> list[bool]:
    return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]


@pytest.mark.parametrize("has_cuda", [False, True])
def test_fused_attention_is_left_out_where_it_has_no_deterministic_kernel(
    attention, monkeypatch, has_cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    make_deterministic(torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert cuda.math_sdp_enabled()
    assert fused() == [True, True, not has_cuda]


@pytest.mark.parametrize("has_cuda", [False, True])
def test_only_backward_passes_on_cuda_forbid_other_kernels(attention, monkeypatch, has_cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_cuda)
    make_deterministic(torch.device("cpu"))
    with deterministic_backward():
        assert torch.get_deterministic_debug_mode() == (2 if has_cuda else 1)
    with pytest.raises(KeyError), deterministic_backward():
        raise KeyError
    assert torch.get_deterministic_debug_mode() == 1
    torch.use_deterministic_algorithms(False)
    with deterministic_backward():
        assert torch.get_deterministic_debug_mode() == 0


def test_without_a_deterministic_kernel_attention_is_no_longer_fused_and_nothing_is_forbidden(
    attention, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    make_deterministic(torch.device("cpu"))
    error = RuntimeError("avg_pool3d_backward_cuda does not have a deterministic implementation, but you set …")
    assert lacks_deterministic_kernel(error)
    assert not lacks_deterministic_kernel(RuntimeError("CUDA out of memory"))
    with pytest.warns(UserWarning, match="may not repeat bit for bit.*avg_pool3d"):
        give_up_fused_attention(error)
    assert fused()[:2] == [False, False]
    with deterministic_backward():
        assert torch.get_deterministic_debug_mode() == 1


@pytest.mark.parametrize("asks_again", [False, True])
def test_the_workspace_of_cublas_stays_in_the_environment_where_torch_asks_again(
    attention, monkeypatch, asks_again: bool
) -> None:
    def product(first: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if asks_again and "CUBLAS_WORKSPACE_CONFIG" not in os.environ and torch.get_deterministic_debug_mode() == 2:
            raise RuntimeError("Deterministic behavior was enabled, but this operation is not deterministic")
        return first

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch, "mm", product)
    forget_cublas_workspace(torch.device("cpu"))
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asks_again else None)
    assert torch.get_deterministic_debug_mode() == 1
