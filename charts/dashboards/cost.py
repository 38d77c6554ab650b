"""The dashboard of costs."""

from __future__ import annotations

from collections.abc import Callable

from grafana import Column, Dashboard, Query, Row, Variable
from queries import (
    AGAIN,
    AT_WORK,
    BY_JOB,
    GOOD_IS_MORE,
    HELD,
    JOB,
    NODES,
    RANGE,
    SMOOTH,
    TEAM,
    TIME_LEFT,
    TRAINING,
    bars,
    choices,
    counted,
    in_phase,
    lines,
    or_zero,
    per_job,
    seconds,
    stat,
    table,
)

TRAINS = 'activity="training"'
MONEY = "currency:USD"
"""The chart replaces the currency, the texts of the two prices, and `own_prices`."""


def own_prices(kind: str) -> str:
    """Prices of namespaces that have their own: none, until the chart puts theirs in the place of this text."""
    return f"(vector($price_{kind}_hour) unless vector(0))"


def priced(amount: Callable[[str], str]) -> str:
    """The prices of GPUs and of nodes, as series to add up. `amount` makes an operand, with the label `namespace`, for
    `gpu` and for `node`.
    """
    return " or ".join(
        f"label_replace({amount(kind)} * on (namespace) group_left () {own_prices(kind)}"
        f' or {amount(kind)} * $price_{kind}_hour, "of", "{kind}", "", "")'
        for kind in ("gpu", "node")
    )


def cost(by: str = "", selector: str = "") -> str:
    """What the nodes and GPUs cost that gangs held in the time shown, including those of deleted jobs."""
    return f"sum {by}({priced(lambda kind: counted(f'ddpjob_held_{kind}_seconds_total', RANGE, selector))}) / 3600"


def hourly_cost(by: str = "") -> str:
    """What an hour costs at the present pace."""
    return f"sum {by}({priced(lambda kind: f'rate(ddpjob_held_{kind}_seconds_total{{{TEAM}}}[{SMOOTH}])')})"


def cost_of_ended(by: str) -> str:
    """What jobs have cost that ended in the time shown, whenever they began."""
    return f"sum {by}({priced(lambda kind: counted(f'ddpjob_{kind}_seconds_total', RANGE))}) / 3600"


def lost_cost() -> str:
    """What of it went into training steps that were lost later."""
    lost = f"sum({priced(lambda kind: counted(f'ddpjob_lost_{kind}_seconds_total', RANGE))}) / 3600"
    return f"({or_zero(lost)})"


TRAINED = f"clamp_min({cost(selector=TRAINING)} - {lost_cost()}, 0)"
HOURLY = f"sum {BY_JOB} ({priced(lambda kind: per_job(f'ddpjob_status_{kind}s'))})"
SPENT = f"sum {BY_JOB} (ddpjob_status_activity_seconds{{{JOB}, {HELD}}}) / 3600 * {HOURLY}"
KEPT = f"sum {BY_JOB} (ddpjob_status_activity_seconds{{{JOB}, {TRAINS}}}) / 3600 * {HOURLY}"

COST = Dashboard(
    "cost", "Cost",
    "What jobs cost by the prices above, which come from the chart (dashboards.prices) and can be changed here, but "
    "for namespaces to which the chart gives prices of their own. "
    "Nodes and GPUs count while a gang holds them: not in a queue, not suspended.",
    (
        Row("In the time shown", (
            stat("Cost", "Of all jobs, including deleted ones. Spares are left out.", cost(), unit=MONEY),
            stat("An hour now", "At the pace of the last ten minutes.", hourly_cost(), unit=MONEY),
            stat("Trained for it", "What went into training steps that were kept.", TRAINED, unit=MONEY),
            stat("Share that trained", "The rest went into starts, snapshots, validation, failures: see 'By activity'.",
                 f"{TRAINED} / ({cost()})", unit="percentunit", steps=GOOD_IS_MORE),
            stat("Lost with failures", "Steps that were lost, stalls, and starting again.",
                 f"{lost_cost()} + ({or_zero(cost(selector=AGAIN))})", unit=MONEY),
            stat("GPU hours", "For which gangs held GPUs.",
                 f"({or_zero(seconds('ddpjob_held_gpu_seconds_total', RANGE))}) / 3600", unit="h"),
            stat("Node hours", "For which gangs held nodes.", f"{seconds(NODES, RANGE)} / 3600", unit="h"),
            stat("Until running jobs end", "What they will cost from now to their end, at their present size.",
                 or_zero(f"sum({TIME_LEFT} / 3600 * {HOURLY})"), unit=MONEY),
        )),
        Row("Where it goes", (
            bars("By namespace", "In the time shown, including deleted jobs.",
                 Query(f"sort_desc({cost('by (namespace) ')})", "{{namespace}}"), MONEY),
            bars("By activity", "In the time shown. Everything but training can be saved on: pulling (image size), "
                 "rendezvous and first_step (starts), saving (snapshots), recovering (failures).",
                 Query(f"sort_desc({cost('by (cause) ')})", "{{cause}}"), MONEY),
            bars("By outcome", "Of jobs that ended in the time shown, from their beginning.",
                 Query(f"sort_desc({cost_of_ended('by (outcome) ')})", "{{outcome}}"), MONEY),
            lines("An hour, by namespace", "At the pace of ten minutes.",
                  Query(hourly_cost("by (namespace) "), "{{namespace}}"), unit=MONEY, stacked=True),
        )),
        Row("Jobs that exist", (
            table("Jobs", "At their present numbers of nodes and GPUs, since they began.",
                  Column("Cost", SPENT, MONEY),
                  Column("Trained for it", KEPT, MONEY),
                  Column("An hour", f"{HOURLY} and {in_phase(AT_WORK)}", MONEY),
                  Column("Until its end", f"{TIME_LEFT} / 3600 * {HOURLY}", MONEY), order="Cost"),
        )),
    ),
    (*choices(many=True), Variable("price_gpu_hour", "Price of a GPU hour", text="2"),
     Variable("price_node_hour", "Price of a node hour", text="0.5")),
    since="now-7d",
)  # fmt: skip
