"""What can happen to a job, as hypothesis draws it, and the specs that it happens to."""

from __future__ import annotations

from hypothesis import strategies as st
from small_cluster import NODES
from world import World

from ddpjob_operator.api.status import Phase

ENDINGS = (
    (0, "Completed"),
    (1, "WorkerException"),
    (1, "PeerLost"),
    (1, "RendezvousFailed"),
    (64, "UserError"),
    (77, "Fenced"),
    (137, ""),
    (143, "Preempted"),
    (143, "Left"),
    (1, "LiveRecoveryFailed"),
)

events = st.one_of(
    st.tuples(st.just("look")),
    st.tuples(st.just("run"), st.integers(0, 9)),
    st.tuples(st.just("schedule"), st.integers(0, 9)),
    st.tuples(st.just("run all")),
    st.tuples(st.just("hear"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(ENDINGS), st.sampled_from((0.0, -3600.0, 3600.0))),
    st.tuples(st.just("end all")),
    st.tuples(st.just("evict"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(0, 9), st.sampled_from((0, 2, 60))),
    st.tuples(st.just("reap"), st.integers(0, 9)),
    st.tuples(st.just("clock"), st.sampled_from((0.1, 1.0, 5.0, 120.0, 3600.0, -3600.0))),
    st.tuples(st.just("kill"), st.integers(0, 6)),
    st.tuples(st.just("lose"), st.integers(0, 6)),
    st.tuples(st.just("watch stalls")),
    st.tuples(st.just("watch catches up")),
    st.tuples(st.just("watch of the job stalls")),
    st.tuples(st.just("another operator starts from an old job")),
    st.tuples(st.just("edit"), st.sampled_from(("a", "b")), st.integers(1, 3)),
    st.tuples(st.just("save every"), st.sampled_from(("5steps", "60seconds"))),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("scale"), st.integers(1, 4)),
    st.tuples(st.just("capacity"), st.sampled_from((0, 1, 2, 3, None))),
    st.tuples(st.just("save")),
    st.tuples(st.just("die"), st.sampled_from(NODES)),
    st.tuples(st.just("silence"), st.sampled_from(NODES)),
    st.tuples(st.just("taint")),
    st.tuples(st.just("come back"), st.sampled_from(NODES)),
    st.tuples(st.just("quota"), st.sampled_from((0, 1, None))),
    st.tuples(st.just("fetch"), st.sampled_from((0, 1, 64))),
    st.tuples(st.just("evict fetchers")),
    st.tuples(st.just("delete fetcher")),
    st.tuples(st.just("delete children")),
    st.tuples(st.just("kubelet lags"), st.booleans()),
    st.tuples(st.just("phases follow")),
)
losses = st.tuples(st.just("lose the status"))
forgeries = st.tuples(
    st.just("label"), st.integers(0, 9), st.sampled_from((-1, 0, 1, 2, 11)), st.sampled_from((None, 0, 1, 7))
)
"""Somebody changes the labels of a pod: its attempt, and its node rank."""

restarts = {"maxRestarts": st.just(4), "nodeLostSeconds": st.sampled_from((0, 4))}
force = {"forceDeleteLostPods": st.just(True)}
sizes = {"nodes": st.integers(1, 3)}
data = {"initializers": st.just([{"name": "data", "script": "true", "path": "data"}])}
gang = {"scheduling": st.fixed_dictionaries({"gang": st.just("Volcano")}, optional={"timeoutSeconds": st.just(20)})}
elastic = {"elastic": st.fixed_dictionaries({"minNodes": st.just(1), "waitSeconds": st.sampled_from((0, 6))})}
specs = st.one_of(
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts, optional=force)}, optional=elastic | data | gang
    ),
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts | {"scope": st.just("InPlace")}, optional=force)},
        optional=elastic | data | gang | {"spares": st.integers(1, 2)},
    ),
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts | {"scope": st.just("Live")}, optional=force)},
        optional=elastic | data | gang | {"spares": st.integers(1, 2)},
    ),
)


policies = {
    "activeDeadlineSeconds": st.sampled_from((30, 300, 3600)),
    "startupDeadlineSeconds": st.sampled_from((30, 300)),
    "cleanPodPolicy": st.sampled_from(("None", "Running", "All")),
    "suspend": st.booleans(),
    "successPolicy": st.sampled_from(("AllNodes", "FirstNode")),
}
window = {"windowSeconds": st.just(60)}
kept = {"scope": st.sampled_from(("InPlace", "Live"))}
pairs = st.one_of(
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts, optional=kept | window)},
        optional=policies | elastic | data,
    ),
    st.fixed_dictionaries(
        sizes | {"restart": st.fixed_dictionaries(restarts | kept, optional=window), "spares": st.integers(1, 2)},
        optional=policies | elastic | data,
    ),
)
"""Specs in which any of these policies may meet any other."""


def happen(world: World, event: tuple[object, ...]) -> None:
    """One event, followed by the look at the job that it causes."""
    cluster, operator = world.cluster, world.operator
    names = sorted(cluster.pods)
    match event:
        case ("run", int(index)) if names:
            cluster.run(names[index % len(names)])
        case ("schedule", int(index)) if names:
            cluster.schedule(names[index % len(names)])
        case ("hear", int(index)) if names:
            cluster.hear(names[index % len(names)])
        case ("run all",):
            for name in names:
                cluster.run(name)
        case ("end", int(index), (int(code), str(reason)), float(skew)) if names:
            cluster.end(names[index % len(names)], code, reason, skew=skew)
        case ("evict", int(index)) if names:
            cluster.evict(names[index % len(names)])
        case ("end all",):
            for name in names:
                cluster.end(name, 0, "Completed")
        case ("delete", int(index), int(grace)) if names:
            cluster.delete(names[index % len(names)], grace)
        case ("reap", int(index)) if names:
            cluster.reap(names[index % len(names)])
        case ("clock", float(seconds)):
            world.pass_time(seconds)
        case ("kill", int(calls)):
            operator.kill_after = calls
        case ("lose", int(calls)):
            operator.lose_after = calls
        case ("watch stalls",):
            operator.pods = tuple(cluster.pods.values())
        case ("watch catches up",):
            operator.pods = operator.job = None
        case ("watch of the job stalls",):
            operator.job = (cluster.job, cluster.version)
        case ("another operator starts from an old job",):
            world.restart()
            world.operator.job = cluster.before
        case ("edit", str(argument), int(nodes)):
            cluster.edit(args=[argument], nodes=nodes)
        case ("save every", str(interval)):
            cluster.edit(snapshots={"every": interval})
        case ("suspend", bool(suspended)):
            cluster.suspend(suspended)
        case ("scale", int(nodes)):
            cluster.edit(nodes=nodes)
        case ("capacity", pods):
            cluster.capacity = pods  # type: ignore[assignment]
        case ("save",):
            cluster.save()
        case ("die", str(node)):
            cluster.die(node)
        case ("taint",):
            cluster.evict_by_taint()
        case ("silence", str(node)):
            cluster.fall_silent(node)
        case ("come back", str(node)):
            cluster.come_back(node)
        case ("fetch", int(code)):
            cluster.fetch(code)
        case ("evict fetchers",):
            cluster.evict_fetchers()
        case ("delete fetcher",) if cluster.fetchers:
            cluster.delete_fetcher(max(cluster.fetchers))
        case ("delete children",):
            cluster.service, cluster.claim = None, False
            cluster.children.clear()
            operator.service = None
        case ("kubelet lags", bool(lags)):
            cluster.kubelet_lags = lags
        case ("phases follow",):
            cluster.phases_follow()
        case ("lose the status",) if cluster.job.status.phase not in (Phase.SUCCEEDED, Phase.FAILED):
            cluster.lose_status()
            operator.job = None
        case ("label", int(index), int(attempt), rank) if names:
            cluster.label(names[index % len(names)], attempt, None if attempt < 0 else rank)  # type: ignore[arg-type]
        case ("quota", pods):
            cluster.quota = pods  # type: ignore[assignment]
    world.look()
