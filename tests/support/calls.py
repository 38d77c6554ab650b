"""What something costs in calls of functions, which is the same on each machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Calls:
    count: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """All calls of the block, those of functions in C too."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: object, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")
