"""Generated files: written where they differ, and only reported with `--check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob_operator.api import generated


def test_check_names_each_file_that_differs_and_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "same.md").write_text("as it was")
    files = {tmp_path / "same.md": "as it was", tmp_path / "old.md": "new"}
    assert generated.write(files, ["--check"]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'old.md'} is out of date; run `make generate`\n"
    assert not (tmp_path / "old.md").exists()


def test_only_what_differs_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "folder" / "page.md"
    assert (generated.write({page: "text"}, []), page.read_text()) == (0, "text")
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert (generated.write({page: "text"}, []), capsys.readouterr().out) == (0, "")
    assert generated.write({page: "text"}, ["--check"]) == 0
