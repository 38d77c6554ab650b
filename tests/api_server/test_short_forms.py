"""`make soak` and `make bench-operator` go on to work: the same code, with a handful of jobs. Their figures say nothing
here, and no limit of theirs is asserted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tests.api_server import bench_operator, soak
from tests.api_server.server import ApiServer


async def test_a_few_jobs_come_and_go_under_the_soak(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "READ_SECONDS", 0.2)
    readings = await soak.churn(api_server, jobs=10, minutes=0.05, console=Console(quiet=True))
    assert all(one.memory > 0 and one.descriptors > 0 and one.threads > 0 and one.series > 0 for one in readings)
    soak.report(readings)
    shown = capsys.readouterr().out
    assert [what for what in soak.GROWTH if what not in shown] == []


async def test_a_few_jobs_give_every_figure_of_the_benchmark(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_operator.Bench(Console(quiet=True))
    sizes = bench_operator.Sizes(jobs=8, nodes=2, rounds=2, most_failures=2, resync_seconds=1.0)
    await bench_operator.measure(api_server, sizes, tmp_path, bench)
    assert all(row.value > 0 for row in bench.rows)
    bench_operator.report(bench.rows)
    shown = capsys.readouterr().out
    assert [row.what for row in bench.rows if row.what.strip() not in shown] == []
