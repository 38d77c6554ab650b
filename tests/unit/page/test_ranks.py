"""The ranks of a job: what is shown of each, and what a folder has of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.unit.page.conftest import Folder

from ddpjob_operator.core.ledger.ranks import NO_REPORTS, PodThrottling, RankRow, Reports
from ddpjob_operator.core.values.trainer_report import LiveReport, Throttling
from ddpjob_operator.local.record import ranks_file
from ddpjob_operator.page.files import reports_of
from ddpjob_operator.page.ranks import ranks_view
from ddpjob_operator.page.shared import Shared

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_a_rank_in_words() -> None:
    last = NOW - timedelta(seconds=3)
    view = ranks_view(
        [RankRow(1, "digits-0-0", "gpu-1", "first_step", 1200, 0.0712, 0.0043, last), RankRow(0)], NOW
    )  # fmt: skip
    assert [row.rank for row in view.rows] == [0, 1]
    row = view.rows[1]
    assert (row.place, row.node, row.phase, row.step) == ("digits-0-0", "gpu-1", "first step", "1,200")
    assert (row.step_time, row.data_wait, row.when) == ("71 ms", "4.3 ms", "3s ago")
    assert view.has_data_wait
    assert not view.has_passes
    assert not ranks_view([RankRow(0)], NOW).has_data_wait


def test_the_last_progress_of_a_script_whose_steps_are_not_seen_is_unknown() -> None:
    (row,) = ranks_view([RankRow(0, phase="script", time=NOW - timedelta(minutes=25))], NOW).rows
    assert (row.phase, row.when, row.time) == ("script", "", "")


def test_a_folder_has_what_the_ranks_of_the_current_attempt_reported(folder: Folder) -> None:
    path = ranks_file(folder.root, "digits")
    path.parent.mkdir(parents=True)
    rank = {"rank": 0, "pod": "digits-1-0", "phase": "train", "step": 7, "time": "2030-01-01T00:00:00.000+00:00"}
    written = {"version": 1, "uid": "u", "attempt": 1, "ranks": [rank, 5, {"rank": "x"}, {"rank": 1, "time": 5}]}
    said = {"seconds": 60.0, "periods": 600, "throttledPeriods": 380, "throttledSeconds": 45.2}
    live = {"ranks": 1, "worldSize": 2, "recoveries": {"lost": 1, "left": 0, "joined": 0}, "droppedSteps": 1}
    written |= {"live": live | {"last": {"kind": "lost", "seconds": 0.21}}}
    written |= {"throttling": {"digits-1-0": said, "digits-1-1": {"seconds": "x"}}}
    path.write_text(json.dumps(written))
    shared = Shared(folder.root)
    assert reports_of(shared, "digits", "u", 1) == Reports(
        ranks=(RankRow(0, "digits-1-0", phase="train", step=7, time=NOW), RankRow(1)),
        throttling=(PodThrottling("digits-1-0", "", Throttling(60.0, 600, 380, 45.2)),),
        live=LiveReport(1, 2, lost=1, dropped_steps=1, last_seconds=0.21),
    )
    assert reports_of(shared, "digits", "u", 2) == NO_REPORTS
    assert reports_of(shared, "digits", "another run", 1) == NO_REPORTS
