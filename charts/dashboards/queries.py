"""Selectors, thresholds and queries that several dashboards use.

Series of a job are aggregated by namespace and ddpjob: a new leader of the operator exports them from another pod.
"""

from __future__ import annotations

from grafana import Column, Panel, Query, Steps, Variable

CLUSTER = 'cluster="$cluster"'
"""One of those whose series the data source has. Where the series have no such label, the variable is empty, and all of
them match.
"""
TEAM = f'{CLUSTER}, namespace=~"$namespace"'
JOB = f'{TEAM}, ddpjob=~"$ddpjob"'
BY_JOB = "by (namespace, ddpjob)"
ON_JOB = "on (namespace, ddpjob)"
WAITS = 'phase=~"Pending|Starting"'
RUNNING = 'phase="Running"'
AT_WORK = 'phase=~"Running|Restarting"'
HELD = 'activity!~"queued|initializing|suspended"'
"""Activities during which a gang holds its nodes."""
TRAINING, AGAIN = 'cause="training"', 'cause=~"recovering|stalled"'
NODES = "ddpjob_held_node_seconds_total"
LOST_NODES = "ddpjob_lost_node_seconds_total"
RANGE, SMOOTH = "$__range", "10m"

GOOD_IS_MORE: Steps = ((0, "red"), (0.5, "orange"), (0.8, "green"))
GOOD_IS_NONE: Steps = ((0, "green"), (1, "red"))
WARN_IF_ANY: Steps = ((0, "green"), (1, "orange"))
SHARE_LOST: Steps = ((0, "green"), (0.1, "orange"), (0.3, "red"))
SNAPSHOT_AGE: Steps = ((0, "green"), (3600, "orange"), (7200, "red"))
BUSY: Steps = ((0, "red"), (0.05, "orange"), (0.5, "green"))


def choices(many: bool) -> tuple[Variable, ...]:
    """Cluster, namespace and job, of those that the operator reports on; a cluster without a job counts, too."""
    return (
        Variable("cluster", "Cluster", "label_values(ddpjob_operator_leader, cluster)", many=False),
        Variable("namespace", "Namespace", f"label_values(ddpjob_status_phase{{{CLUSTER}}}, namespace)", many),
        Variable("ddpjob", "DDPJob", f"label_values(ddpjob_status_phase{{{TEAM}}}, ddpjob)", many),
    )


def or_zero(expr: str) -> str:
    return f"{expr} or vector(0)"


def in_phase(phase: str) -> str:
    return f"{ON_JOB} ddpjob_status_phase{{{JOB}, {phase}}}"


def per_job(metric: str, function: str = "max") -> str:
    return f"{function} {BY_JOB} ({metric}{{{JOB}}})"


def stat(title: str, help: str, *queries: str | Query, unit: str = "short", steps: Steps = (), **more: object) -> Panel:
    asked = [item if isinstance(item, Query) else Query(item) for item in queries]
    return Panel(title, "stat", help, asked, unit=unit, steps=steps, width=3, height=4, **more)  # type: ignore[arg-type]


def lines(title: str, help: str, *queries: Query, unit: str = "short", **more: object) -> Panel:
    return Panel(title, "timeseries", help, queries, unit=unit, **more)  # type: ignore[arg-type]


def table(title: str, help: str, *columns: Column, order: str = "", width: int = 24) -> Panel:
    return Panel(title, "table", help, columns=columns, width=width, height=9, order=order)


def bars(title: str, help: str, query: Query, unit: str = "short", steps: Steps = ()) -> Panel:
    return Panel(title, "bargauge", help, [query], unit=unit, steps=steps)


def counted(metric: str, window: str, selector: str = "") -> str:
    """What the operator has counted in a window that Grafana names. `increase` does not see a series begin with the
    first event of its kind. One that began in the window counts in full, also where it is that of an operator which is
    gone since: its process began then too, or was there without it. Otherwise the series may just not have been
    scraped as the window began, and has counted long before.
    """
    series = f"{metric}{{{', '.join(filter(None, (TEAM, selector)))}}}"
    grown, most = f"increase({series}[{window}])", f"max_over_time({series}[{window}])"
    process = f"ddpjob_operator_start_timestamp_seconds{{{CLUSTER}}}"
    seen = f"(min_over_time({process}[{window}]) > time() - {window}_ms / 1000 or {process} offset {window})"
    # more than its highest value where the process has begun anew in its container
    full = f"({grown} > {most} or {most}) and on (instance, pod) {seen}"
    return f"({full} unless {series} offset {window} or {grown})"


def seconds(metric: str, window: str, selector: str = "", by: str = "") -> str:
    """Seconds times nodes or GPUs in a window, including those of deleted jobs."""
    return f"sum {by}{counted(metric, window, selector)}"


def held_now(metric: str, selector: str = "", by: str = "") -> str:
    """How many nodes or GPUs gangs hold, smoothed."""
    return f"sum {by}(rate({metric}{{{', '.join(filter(None, (TEAM, selector)))}}}[{SMOOTH}]))"


def quantiles(
    histogram: str, window: str, selector: str = CLUSTER, legend: str = "", most: int = 99
) -> tuple[Query, ...]:
    """The median, and what all but a few stay below."""
    return tuple(
        Query(
            f"histogram_quantile({q / 100}, sum by (le) (rate({histogram}_bucket{{{selector}}}[{window}])))",
            f"{legend}p{q}",
        )
        for q in (50, most)
    )


PROGRESS = f"{per_job('ddpjob_status_step')} / {per_job('ddpjob_status_total_steps')}"
TIME_LEFT = f"clamp_min({per_job('ddpjob_status_eta_timestamp_seconds')} - time(), 0)"
SNAPSHOT = f"time() - {per_job('ddpjob_status_snapshot_timestamp_seconds')} and {in_phase(AT_WORK)}"
"""Of jobs that have something to lose."""
