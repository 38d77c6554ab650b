"""Output whose reader is slow, is gone, or has another encoding."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ddpjob_operator.cli.output import Pipe, in_background, lasting

LINE = "x" * 1023 + "\n"


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """The end to read of a pipe, and the other."""
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:
            continue


def read_all(end: int, size: int) -> str:
    found = b""
    while len(found) < size and (data := os.read(end, 1 << 16)):
        found += data
    return found.decode()


def test_a_reader_that_does_not_read_is_not_waited_for_and_gets_everything_later(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = os.fdopen(os.dup(ends[1]), "w")
    monkeypatch.setattr(sys, "stdout", lasting(stdout))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(read_all(ends[0], 512 * len(LINE))))
    with in_background():
        for _ in range(512):  # eight times what a pipe holds
            print(LINE, end="")
        reader.start()
    reader.join()
    assert found == [LINE * 512]


def test_what_is_beyond_the_limit_is_dropped_with_a_note(ends: tuple[int, int]) -> None:
    pipe = Pipe(ends[1], most_bytes=300_000)
    pipe.begin_background()
    for _ in range(1000):
        pipe.write(LINE.encode())
    found: list[str] = []

    def read() -> None:
        found.append(read_all(ends[0], 65536))
        while "the end" not in "".join(found):  # which two reads may share
            found.append(os.read(ends[0], 1 << 16).decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    while "the end" not in "".join(found):
        pipe.write(b"the end")
        time.sleep(0.01)  # what the reader leaves behind has to fit into the kernel's buffer
    pipe.end_background()
    reader.join()
    assert "bytes are not shown, because nothing was read" in "".join(found)


def test_a_character_that_the_encoding_does_not_have_is_replaced(ends: tuple[int, int]) -> None:
    stdout = io.TextIOWrapper(os.fdopen(os.dup(ends[1]), "wb"), encoding="ascii")
    print("loss … 0.5", file=lasting(stdout))
    assert os.read(ends[0], 100) == b"loss ? 0.5\n"
