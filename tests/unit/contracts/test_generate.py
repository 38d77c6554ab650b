"""`make generate` and its check run every program of the repository that writes files, whatever one of them says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def load() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/generate.py"))


def test_every_program_beside_what_it_writes_is_run() -> None:
    found = [
        *ROOT.glob("docs/*.py"),
        *ROOT.glob("charts/*.py"),
        *(main.parent for main in ROOT.glob("charts/*/__main__.py")),
    ]
    assert {str(path.relative_to(ROOT)) for path in found} - {"docs/generate.py"} == set(load()["SCRIPTS"])


def test_one_that_is_out_of_date_is_heard_and_keeps_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    stale, fresh = tmp_path / "stale.py", tmp_path / "fresh.py"
    stale.write_text("import sys\nsys.exit(1 if '--check' in sys.argv else 0)")
    fresh.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()")
    main = load()["main"]
    monkeypatch.setitem(main.__globals__, "MODULES", ())
    monkeypatch.setitem(main.__globals__, "SCRIPTS", (str(stale), str(fresh)))
    assert main(["--check"]) == 1
    assert (tmp_path / "ran").exists()
    assert main([]) == 0
