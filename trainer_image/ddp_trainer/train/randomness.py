"""Where a run's random numbers come from, and what makes it repeat bit for bit."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ddp_trainer.client.batches import mixed_seed
from ddp_trainer.snapshots.codec import rng


def seed_everything(*parts: int) -> None:
    """Seed torch on all devices, NumPy and Python with the mix of `parts`, for what is drawn from now on.

    A task may draw from any of them; a snapshot holds the state of all (`snapshots.rng`).
    """
    seed = mixed_seed(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave all generators of this rank, its device's included, as they were found."""
    kept = rng.capture()
    try:
        yield
    finally:
        rng.restore(kept)


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic(device: torch.device) -> None:
    """Take kernels that give the same bits each time on `device`; warn, once an operation, where there is none.

    Backward passes belong into `deterministic_backward`.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor is only of use against reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if CUBLAS_WORKSPACE not in os.environ:
        os.environ[CUBLAS_WORKSPACE] = ":4096:8"
        if device.type == "cuda":
            forget_cublas_workspace(device)
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def forget_cublas_workspace(device: torch.device) -> None:
    """Let torch see CUBLAS_WORKSPACE_CONFIG once, and remove it if torch does not ask again.

    torch parses it at each matrix product, which makes a launch four times as long, for the size of the workspace. It
    asks once whether the size is one of the deterministic ones. torch gives each handle and stream a workspace of its
    own, which is what keeps results the same (cuBLAS, "Results reproducibility").
    """
    matrix = torch.ones(1, 1, device=device)
    torch.mm(matrix, matrix)
    setting = os.environ.pop(CUBLAS_WORKSPACE)
    torch.set_deterministic_debug_mode("error")
    try:
        torch.mm(matrix, matrix)
    except RuntimeError:
        os.environ[CUBLAS_WORKSPACE] = setting
    finally:
        torch.set_deterministic_debug_mode("warn")


@contextmanager
def deterministic_backward() -> Iterator[None]:
    """Around a backward pass. Of fused attention on CUDA it takes the deterministic kernels.

    torch has them, but uses them only while an operation without such a kernel is an error and not a warning (ATen's
    attention_backward.cu). Raises that RuntimeError, which `lacks_deterministic_kernel` recognises.
    """
    cuda: Any = torch.backends.cuda
    warns = torch.cuda.is_initialized() and torch.is_deterministic_algorithms_warn_only_enabled()  # type: ignore[no-untyped-call]
    if not (warns and cuda.flash_sdp_enabled()):
        yield
        return
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("warn")


def lacks_deterministic_kernel(error: BaseException) -> bool:
    """Whether a pass failed in `deterministic_backward` because some operation has no deterministic kernel."""
    return isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error)


def give_up_fused_attention(error: BaseException) -> None:
    """After `error`: that operation may run, with a warning, and attention falls back on plain matrix products, which
    need memory for the scores of every pair of positions.
    """
    warnings.warn(f"this run may not repeat bit for bit, and attention is slower: {error}", stacklevel=2)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
