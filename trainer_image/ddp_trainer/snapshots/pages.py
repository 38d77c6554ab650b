"""Memory in large pages. Filling a gigabyte of new memory costs a quarter of a million page faults of 4 KiB, which take
longer than copying it, or five hundred of 2 MiB.

Linux gives large pages to whoever asks for them (madvise(2), MADV_HUGEPAGE) unless transparent huge pages are switched
off; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, Final

from torch import Tensor

LARGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14


def in_large_pages(tensor: Tensor) -> Tensor:
    """`tensor`, in host memory and not written to yet, for which large pages are asked wherever it covers one."""
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // LARGE_PAGE * LARGE_PAGE
    if end > begin and (madvise := _madvise()) is not None:
        # Advice: where the kernel does not take it, small pages do as well.
        madvise(begin, end - begin, _MADV_HUGEPAGE)
    return tensor


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
