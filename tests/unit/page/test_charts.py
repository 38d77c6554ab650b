"""Charts: where values are drawn, what axes say, and what a reader without eyes is told."""

from __future__ import annotations

import pytest

from ddpjob_operator.page.axis import Axis, clock, compact, time_ticks, value_axis
from ddpjob_operator.page.charts import StepChart, loss_chart, throughput_chart, track
from ddpjob_operator.page.values import Course, LossPoint


def course(*losses: float | None, attempt: int = 0, first: int = 1) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(first + index, loss, attempt) for index, loss in enumerate(losses))


def drawn(found: Course) -> StepChart:
    chart = loss_chart(found, 1000, 300)
    assert chart is not None
    return chart


def test_a_value_is_drawn_between_the_ends_in_proportion() -> None:
    axis = Axis(0, 10, 100, 300)
    assert [axis.at(value) for value in (0, 5, 10, 99)] == [100, 200, 300, 300]


def test_losses_of_very_different_sizes_get_a_logarithmic_axis() -> None:
    axis = value_axis([2.3, 0.01], 200, 0)
    assert axis.logarithmic
    assert [tick.label for tick in axis.ticks(4)] == ["0.01", "0.03", "0.1", "0.3", "1"]
    assert not value_axis([2.3, 0.5], 200, 0).logarithmic
    assert not value_axis([2.3, -0.01], 200, 0).logarithmic


def test_ticks_are_round_and_within_the_axis() -> None:
    assert [tick.label for tick in Axis(0, 460, 0, 460).ticks(5)] == ["0", "100", "200", "300", "400"]
    assert [tick.label for tick in Axis(0.5, 0.5, 0, 100).ticks(5)] == ["0.5"]


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (12, ["0", "5 s", "10 s"]),
        (100, ["0", "30 s", "1 min", "1 min 30 s"]),
        (5400, ["0", "30 min", "1 h", "1 h 30 min"]),
        (864000, ["0", "3 d", "6 d", "9 d"]),
    ],
)
def test_an_axis_of_time_has_units(seconds: float, labels: list[str]) -> None:
    assert [tick.label for tick in time_ticks(seconds, 0, 100, 4)] == labels


@pytest.mark.parametrize(("value", "text"), [(0.05, "0.05"), (9000, "9,000"), (12_500, "12,500"), (3e6, "3M")])
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert compact(value) == text


def test_a_time_of_zero_is_not_empty() -> None:
    assert clock(0.2) == "0"


def test_without_two_losses_there_is_no_chart() -> None:
    assert loss_chart(Course(), 1000, 300) is None
    assert loss_chart(Course(kept=course(1.0)), 1000, 300) is None
    assert loss_chart(Course(kept=course(1.0, None)), 1000, 300) is None


def test_the_line_has_a_gap_where_the_loss_was_not_finite_and_a_mark() -> None:
    chart = drawn(Course(kept=course(3.0, 2.0, None, 1.0, 0.9)))
    assert len(chart.lines) == 2
    assert [mark.title for mark in chart.not_finite] == ["step 3: the loss was not finite"]


def test_each_attempt_has_a_band_and_they_meet() -> None:
    found = Course(kept=(*course(3.0, 2.0, 1.5), *course(1.4, 1.2, attempt=1, first=4)))
    first, second = drawn(found).bands
    assert (first.title, second.title) == ("attempt 0: steps 1 to 3", "attempt 1: steps 4 to 5")
    assert second.x == first.x + first.width
    assert (first.odd, second.odd) == (False, True)


def test_the_steps_so_far_have_the_whole_width() -> None:
    chart = drawn(Course(kept=course(2.0, 1.0)))
    assert chart.hovers[-1].cursor == chart.right


def test_steps_that_are_known_from_far_on_have_the_whole_width_too() -> None:
    chart = drawn(Course(kept=course(2.0, 1.0, 0.5, first=1_000_000)))
    assert (chart.hovers[0].cursor, chart.hovers[-1].cursor) == (chart.left, chart.right)


def test_many_steps_are_drawn_as_few_places_with_their_spread() -> None:
    chart = drawn(Course(kept=course(*(2.0 + (step % 7) / 10 for step in range(100_000)))))
    assert chart.lines[0].count("L") < 1000
    assert chart.spread.startswith("M")
    assert len(chart.hovers) <= 120


def test_steps_that_two_attempts_lost_are_not_connected() -> None:
    lost = (*course(2.0, 1.9, first=3), *course(1.4, 1.3, attempt=1, first=40))
    assert len(drawn(Course(kept=course(3.0, 2.5), lost=lost)).lost) == 2


def test_hovering_anywhere_says_the_step_its_loss_and_its_attempt() -> None:
    chart = drawn(Course(kept=course(3.0, 2.0, 1.0)))
    assert [hover.text for hover in chart.hovers] == [
        "step 1, loss 3, attempt 0",
        "step 2, loss 2, attempt 0",
        "step 3, loss 1, attempt 0",
    ]
    assert chart.hovers[0].x == chart.left
    assert chart.hovers[-1].x + chart.hovers[-1].width == pytest.approx(chart.right, abs=0.2)


def test_a_reader_who_does_not_see_the_chart_gets_it_in_words() -> None:
    chart = drawn(Course(kept=course(3.0, 0.5, 1.0), lost=course(0.9, first=4)))
    assert chart.summary == (
        "Training loss from 3 at step 1 to 1 at step 3; the least is 0.5 at step 2. 1 steps were trained again."
    )


def rates(*given: float | None, attempt: int = 0, first: int = 1) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(first + index, 1.0, attempt, rate) for index, rate in enumerate(given))


def measured(found: Course) -> StepChart:
    chart = throughput_chart(found, 1000, 300)
    assert chart is not None
    return chart


def test_without_two_steps_that_have_it_there_is_no_chart_of_the_throughput() -> None:
    assert throughput_chart(Course(kept=course(3.0, 2.0)), 1000, 300) is None
    assert throughput_chart(Course(kept=rates(None, 800.0)), 1000, 300) is None


def test_half_the_throughput_is_drawn_at_half_the_height() -> None:
    chart = measured(Course(kept=rates(None, 1000.0, 500.0)))
    whole, half = (chart.bottom - (hover.y or 0) for hover in chart.hovers)
    assert half == pytest.approx(whole / 2, abs=0.1)
    assert chart.y_ticks[0].label == "0"
    assert chart.y_title == "samples per second"


def test_a_step_is_at_the_same_place_in_both_charts_and_attempts_are_marked_in_both() -> None:
    found = Course(kept=(*rates(None, 900.0, 905.0), *rates(None, 400.0, 410.0, attempt=1, first=4)))
    losses, throughput = drawn(found), measured(found)
    assert throughput.hovers[-1].cursor == losses.hovers[-1].cursor
    assert [band.label for band in throughput.bands] == [band.label for band in losses.bands]
    assert throughput.hovers[-1].text == "step 6, 410 samples/s, attempt 1"


def test_the_throughput_of_steps_that_were_trained_again_is_drawn_apart() -> None:
    assert len(measured(Course(kept=rates(900.0, 900.0), lost=rates(100.0, 90.0, first=2))).lost) == 1


def test_a_reader_who_does_not_see_the_throughput_gets_it_in_words() -> None:
    assert measured(Course(kept=rates(None, 12_500.0, 900.0, 13_000.0))).summary == (
        "Throughput of all ranks: a median of 12,500 samples/s, 13,000 samples/s at step 4; the least is 900 samples/s "
        "at step 3."
    )


def test_a_track_has_snapshots_and_failures_where_they_were() -> None:
    found = track(50, 100, [20, 40, 20], [(45, "OOMKilled")], 216)
    assert found.done == 108
    assert [(mark.x, mark.title) for mark in found.snapshots] == [
        (48, "snapshot of step 20"),
        (88, "snapshot of step 40"),
    ]
    assert [(mark.x, mark.title) for mark in found.failures] == [(98, "OOMKilled at step 45")]
