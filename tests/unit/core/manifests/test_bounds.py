"""What an administrator allows: every bound with the field, the value and the way out, and no way around it."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from builders import DEFAULTS, NOW, failed, in_phase, later, make_job, make_pod, seen
from looks import admitted, created

from ddpjob_operator.api.status import Phase, SnapshotStatus
from ddpjob_operator.core.manifests.admission import admit
from ddpjob_operator.core.manifests.admitted import Refused
from ddpjob_operator.core.manifests.bounds import amount, clamp_to_bounds, counts_on_whole, with_default_resources
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import CreatePod
from ddpjob_operator.core.values.job import Bounds, Defaults
from ddpjob_operator.core.values.observed import Observed, ServiceView

PLACE = Place(0, 0, ServiceView("10.96.0.7", 0))
GPUS = {"limits": {"nvidia.com/gpu": 8}}


def refusals(bounds: Bounds, **spec: Any) -> list[str]:
    found = admit(make_job(**spec), replace(DEFAULTS, bounds=bounds))
    return list(found.problems) if isinstance(found, Refused) else []


def container(name: str = "trainer", **resources: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", "resources": resources}


def template(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": list(containers), **spec}}}


@pytest.mark.parametrize(
    ("bounds", "spec", "reported"),
    [
        pytest.param(Bounds(), {"nodes": 1024, "resources": GPUS}, None, id="no bound"),
        pytest.param(Bounds(max_nodes=4), {"nodes": 4}, None, id="as many nodes as allowed"),
        pytest.param(Bounds(max_nodes=4), {"nodes": 5}, "spec.nodes: 5 is more than the 4", id="more nodes"),
        pytest.param(Bounds(max_nodes=4), {"nodes": 4, "spares": 1, "restart": {"scope": "InPlace"}},
                     "spec.nodes: 4 and spares 1 is more than the 4", id="spares are nodes too"),
        pytest.param(Bounds(max_procs_per_node=4), {"procsPerNode": 5},
                     "spec.procsPerNode: 5 is more than the 4", id="more ranks"),
        pytest.param(Bounds(max_procs_per_node=4), {"resources": GPUS},
                     "spec.procsPerNode: 8 is more than the 4", id="more ranks, one for each GPU"),
        pytest.param(Bounds(resources={"nvidia.com/gpu": "8"}), {"resources": GPUS}, None, id="as many GPUs"),
        pytest.param(Bounds(resources={"nvidia.com/gpu": "8"}), {}, None, id="none at all"),
        pytest.param(Bounds(resources={"nvidia.com/gpu": "4"}), {"resources": GPUS},
                     "spec.resources.limits[nvidia.com/gpu]: a pod uses 8, more than the 4", id="more GPUs"),
        pytest.param(Bounds(resources={"memory": "16Gi"}), {"resources": {"limits": {"memory": "16384Mi"}}}, None,
                     id="the same in another unit"),
        pytest.param(Bounds(resources={"memory": "16Gi"}), {"resources": {"limits": {"memory": "17Gi"}}},
                     "spec.resources.limits[memory]: a pod uses 17Gi, more than the 16Gi", id="more memory"),
        pytest.param(Bounds(resources={"memory": "16Gi"}), {"resources": {"requests": {"memory": "1Gi"}}},
                     "spec.resources.limits[memory]: is not set for container trainer", id="memory without a limit"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(limits={"cpu": "5"})),
                     "limits[cpu]: a pod uses 5, more than the 4", id="by way of the template"),
        pytest.param(Bounds(resources={"cpu": "4"}),
                     template(container(limits={"cpu": "3"}), container("b", limits={"cpu": "1500m"})),
                     "limits[cpu]: a pod uses 4.5, more than the 4", id="by way of a sidecar"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(limits={"cpu": "3"}), container("b")),
                     "limits[cpu]: is not set for container b", id="a sidecar without a limit"),
        pytest.param(Bounds(resources={"example.com/fpga": "1"}),
                     template(initContainers=[container("i", requests={"example.com/fpga": 2})]),
                     "limits[example.com/fpga]: a pod uses 2, more than the 1", id="by way of an init container"),
        pytest.param(Bounds(resources={"cpu": "4"}),
                     template(container(limits={"cpu": "3"}), initContainers=[container("i", limits={"cpu": "4"})]),
                     None, id="an init container has ended when the others run"),
        pytest.param(Bounds(resources={"example.com/fpga": "1"}),
                     template(initContainers=[container("i", requests={"example.com/fpga": 1})
                                              | {"restartPolicy": "Always"},
                                              container("j", requests={"example.com/fpga": 1})]),
                     "limits[example.com/fpga]: a pod uses 2, more than the 1", id="by way of a native sidecar"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(), resources={"limits": {"cpu": "5"}}),
                     "limits[cpu]: a pod uses 5, more than the 4", id="by way of the pod as a whole"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(), resources={"limits": {"cpu": "4"}}),
                     None, id="containers that share what the pod has"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(limits={"cpu": "9000000000n"})),
                     "a pod uses 9, more than the 4", id="in a unit that hides it"),
        pytest.param(Bounds(resources={"cpu": "4"}), template(container(limits={"cpu": "many"})),
                     "limits[cpu]: 'many' is not a quantity", id="no quantity"),
    ],
)  # fmt: skip
def test_a_new_job_beyond_a_bound_is_refused(bounds: Bounds, spec: dict[str, Any], reported: str | None) -> None:
    said = refusals(bounds, **spec)
    assert bool(said) == (reported is not None)
    if reported is not None:
        assert reported in said[0]
        assert "namespace research" in said[0] or "is not a quantity" in said[0]


WHOLE = {"limits": {"cpu": "4"}}


@pytest.mark.parametrize(
    ("bounds", "spec", "counts"),
    [
        ({"cpu": "4"}, template(container(), resources=WHOLE), True),
        ({"cpu": "4"}, template(container(limits={"cpu": "3"}), resources=WHOLE), False),
        ({"cpu": "4"}, template(container(limits={"cpu": "3"}), container("b"), resources=WHOLE), True),
        ({"cpu": "4"}, template(container(), resources={"limits": {"cpu": "many"}}), True),
        ({"cpu": "4"}, template(container(limits={"cpu": "3"})), False),
        ({"memory": "4Gi"}, template(container(), resources=WHOLE), False),
        ({"nvidia.com/gpu": "8"}, template(container(), resources=WHOLE), False),
        ({}, template(container(), resources=WHOLE), False),
    ],
)
def test_a_bound_counts_on_the_pod_as_a_whole_where_a_container_has_no_limit(
    bounds: dict[str, str], spec: dict[str, Any], counts: bool
) -> None:
    pod = build_pod(admitted(make_job(**spec)), PLACE)
    assert counts_on_whole(pod, Bounds(resources=bounds)) is counts


@pytest.mark.parametrize(("bounds", "whole"), [({"cpu": "4"}, True), ({"memory": "4Gi"}, False), ({}, False)])
def test_what_a_bound_counts_on_is_asked_of_the_api_server(bounds: dict[str, str], whole: bool) -> None:
    spec = template(container(), resources=WHOLE) | {"spares": 1, "restart": {"scope": "InPlace"}}
    job = make_job(in_phase(Phase.RUNNING, spec=spec), **spec)
    defaults = replace(DEFAULTS, bounds=Bounds(resources=bounds))
    decided = plan(job, seen(make_pod(0), make_pod(1)), NOW, defaults)
    assert [action.whole for action in decided.actions if isinstance(action, CreatePod)] == [whole]


@pytest.mark.parametrize("limit", ["0", 0, "0Gi", "0.0", "0e3"])
def test_a_limit_of_nothing_is_no_limit(limit: str | int) -> None:
    """Kubernetes takes it for none: kubernetes/kubernetes#70017."""
    (said,) = refusals(Bounds(resources={"memory": "16Gi"}), **template(container(limits={"memory": limit})))
    assert said.startswith("spec.resources.limits[memory]: is not set for container trainer")


@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize(
    "spec",
    [
        template(container(limits={"nvidia.com/mig-1g.5gb": 10})),
        template(initContainers=[container("i", limits={"nvidia.com/mig-1g.5gb": 10})]),
        template(resources={"limits": {"nvidia.com/mig-1g.5gb": 10}}),
    ],
)
def test_a_class_of_resources_that_no_bound_names_is_refused(spec: dict[str, Any], kind: str) -> None:
    given = json.loads(json.dumps(spec).replace("limits", kind))
    assert refusals(Bounds(), **given) == []
    (said,) = refusals(Bounds(resources={"nvidia.com/gpu": "8"}), **given)
    assert said.startswith(f"spec.resources.{kind}[nvidia.com/mig-1g.5gb]: is not among the resources")
    assert refusals(Bounds(resources={"nvidia.com/gpu": "8", "nvidia.com/mig-1g.5gb": "10"}), **given) == []


def test_what_fetches_the_data_is_held_to_the_bounds_too() -> None:
    initializers = [{"name": "data", "source": "https://example.com/digits.tar", "path": "datasets/digits"}]
    bounds = Bounds(resources={"memory": "16Gi"})
    given = {"initializers": initializers, "resources": {"limits": {"memory": "1Gi"}}}
    assert refusals(bounds, **given) == []
    pod = build_initializer(admitted(make_job(**given), replace(DEFAULTS, bounds=bounds)), 0)
    assert [item["resources"] for item in pod["spec"]["containers"]] == [
        {"limits": {"memory": "16Gi"}, "requests": {"memory": "0"}}
    ]
    mounted = {"podTemplate": {"spec": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}}}
    assert len(refusals(Bounds(), **given, **mounted)) == 1


@pytest.mark.parametrize(
    ("nodes", "spares", "held_to"), [(2, 2, (2, 2)), (2, 64, (2, 2)), (4, 1, (4, 0)), (5, 1, (5, 0)), (5, 0, (5, 0))]
)
def test_spares_that_an_edit_adds_are_held_to_the_bound_on_nodes(
    nodes: int, spares: int, held_to: tuple[int, int]
) -> None:
    job = make_job(in_phase(Phase.RUNNING, nodes=nodes), nodes=nodes, spares=spares, restart={"scope": "InPlace"})
    held = clamp_to_bounds(job, Bounds(max_nodes=4))
    assert (held.spec.nodes, held.spec.spares) == held_to
    assert bool(held.rejected_edit) == (spares != held_to[1])


def test_an_edit_beyond_a_bound_that_no_server_refused_ends_with_the_attempt() -> None:
    status = in_phase(Phase.RUNNING, nodes=2, spec={"nodes": 2})
    defaults = replace(DEFAULTS, bounds=Bounds(max_nodes=2))
    observed = seen(make_pod(0), failed(1, 137))
    restarted = plan(make_job(status, nodes=2), observed, NOW, defaults)
    assert restarted.status.phase is Phase.RESTARTING
    refused = plan(make_job(status, nodes=3), observed, NOW, defaults)
    condition = cond.find(refused.status.conditions, cond.FAILED)
    assert condition is not None
    assert (refused.status.phase, condition.reason) == (Phase.FAILED, "BeyondBounds")
    assert [failure.reason for failure in refused.status.failures] == ["WorkerKilled", "BeyondBounds"]
    assert (restarted.status.restarts, refused.status.restarts) == (1, 0)


def test_a_change_of_size_takes_no_job_beyond_a_bound_either() -> None:
    made_from = {"nodes": 3, "elastic": {"minNodes": 1}, "procsPerNode": 1}
    waits = {"snapshot": SnapshotStatus(step=9, time=later(5), verified=True)}
    status = in_phase(Phase.RUNNING, nodes=2, spec=made_from, **waits)
    ready = make_pod(0, ready=True, ready_since=NOW)
    spare = replace(ready, name="digits-0-s0", uid="spare-0", node_rank=None)
    observed, defaults = seen(make_pod(0), make_pod(1), spare), replace(DEFAULTS, bounds=Bounds(max_procs_per_node=4))
    grown = plan(make_job(status, **made_from), observed, later(10), defaults)
    assert (grown.status.phase, grown.status.nodes.total) == (Phase.RESTARTING, 3)
    refused = plan(make_job(status, **made_from | {"procsPerNode": 8}), observed, later(10), defaults)
    assert refused.status.phase is Phase.FAILED
    assert [event.reason for event in refused.events] == ["Failed"]


def test_a_gang_that_was_given_up_for_want_of_nodes_takes_no_edited_job_beyond_a_bound() -> None:
    allowed = {"scheduling": {"timeoutSeconds": 60}, "procsPerNode": 4}
    status = in_phase(Phase.STARTING, nodes=2, spec=allowed, attempt_start_time=later(-100))
    pods = make_pod(0), replace(make_pod(1, "Pending"), node_name=None)
    defaults = replace(DEFAULTS, bounds=Bounds(max_procs_per_node=4))
    released = plan(make_job(status, **allowed), seen(*pods), NOW, defaults)
    assert (released.status.phase, released.status.attempt) == (Phase.STARTING, 1)
    refused = plan(make_job(status, **allowed | {"procsPerNode": 8}), seen(*pods), NOW, defaults)
    assert refused.status.phase is Phase.FAILED
    condition = cond.find(refused.status.conditions, cond.FAILED)
    assert condition is not None
    assert condition.reason == "BeyondBounds"


def test_no_spare_is_made_from_an_edit_that_is_beyond_a_bound() -> None:
    allowed = {"spares": 1, "restart": {"scope": "InPlace"}, "procsPerNode": 4}
    job = make_job(in_phase(Phase.RUNNING, spec=allowed), **allowed)
    observed, defaults = seen(make_pod(0), make_pod(1)), replace(DEFAULTS, bounds=Bounds(max_procs_per_node=4))
    assert created(plan(job, observed, NOW, defaults)) == ["digits-0-s0"]
    edited = make_job(job.status, **allowed | {"procsPerNode": 8})
    decided = plan(edited, observed, NOW, defaults)
    assert (decided.status.phase, created(decided)) == (Phase.RUNNING, [])


def test_a_job_where_none_is_served_is_refused_and_one_that_runs_goes_on() -> None:
    (said,) = refusals(Bounds(served=False))
    assert said.startswith("metadata.namespace: research belongs to the cluster or to the operator")
    running = make_job(in_phase(Phase.RUNNING, nodes=2, spec={"nodes": 2}), nodes=2)
    decided = plan(running, seen(make_pod(0), make_pod(1)), NOW, replace(DEFAULTS, bounds=Bounds(served=False)))
    assert decided.status.phase is Phase.RUNNING


def test_every_bound_that_is_broken_is_named_at_once() -> None:
    bounds = Bounds(max_nodes=1, max_procs_per_node=1, resources={"nvidia.com/gpu": "1"})
    assert len(refusals(bounds, nodes=2, resources=GPUS)) == 3


def test_a_refused_job_is_failed_and_nothing_is_made_for_it() -> None:
    decided = plan(make_job(nodes=3), Observed(), NOW, replace(DEFAULTS, bounds=Bounds(max_nodes=2)))
    assert (decided.status.phase, decided.actions) == (Phase.FAILED, ())
    failed = cond.find(decided.status.conditions, cond.FAILED)
    assert failed is not None
    assert failed.reason == "BeyondBounds"
    assert failed.message == (
        "spec.nodes: 3 is more than the 2 that this cluster's administrator allows in namespace research; use fewer"
    )


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDED])
def test_a_bound_that_comes_later_stops_no_job(phase: Phase) -> None:
    job = make_job(in_phase(phase, nodes=3), nodes=3)
    assert clamp_to_bounds(job, Bounds(max_nodes=2)) == job


@pytest.mark.parametrize(
    ("nodes", "held_to"), [(4, 4), (5, 4), (1024, 4)], ids=["within", "one too many", "far too many"]
)
def test_an_elastic_job_does_not_grow_beyond_a_bound(nodes: int, held_to: int) -> None:
    job = make_job(in_phase(Phase.RUNNING, nodes=3), nodes=nodes, elastic={"minNodes": 2})
    held = clamp_to_bounds(job, Bounds(max_nodes=4))
    assert held.spec.nodes == held_to
    assert bool(held.rejected_edit) == (nodes != held_to)


@pytest.mark.parametrize(
    ("total", "nodes", "held_to"),
    [(8, 8, 8), (8, 9, 8), (8, 6, 6), (6, 8, 6), (3, 8, 4)],
    ids=["it was here before", "no edit makes it larger", "smaller as it was edited", "shrunk", "within"],
)
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDED])
def test_a_bound_that_comes_later_takes_no_node_from_an_elastic_job(
    phase: Phase, total: int, nodes: int, held_to: int
) -> None:
    job = make_job(in_phase(phase, nodes=total), nodes=nodes, elastic={"minNodes": 1})
    held = clamp_to_bounds(job, Bounds(max_nodes=4))
    assert held.spec.nodes == held_to
    assert bool(held.rejected_edit) == (nodes != held_to)


@pytest.mark.parametrize(
    ("total", "nodes", "spares", "held_to"),
    [(4, 4, 3, (4, 0)), (2, 2, 3, (2, 2)), (3, 4, 1, (4, 0)), (3, 9, 9, (4, 0)), (6, 6, 1, (6, 0)), (2, 3, 1, (3, 1))],
)
def test_spares_get_what_the_nodes_of_an_elastic_job_leave_of_a_bound(
    total: int, nodes: int, spares: int, held_to: tuple[int, int]
) -> None:
    spec = {"nodes": nodes, "spares": spares, "elastic": {"minNodes": 1}, "restart": {"scope": "InPlace"}}
    held = clamp_to_bounds(make_job(in_phase(Phase.RUNNING, nodes=total), **spec), Bounds(max_nodes=4))
    assert (held.spec.nodes, held.spec.spares) == held_to
    assert bool(held.rejected_edit) == (held_to != (nodes, spares))


def test_an_elastic_job_that_runs_goes_on_with_its_nodes_when_a_bound_comes() -> None:
    spec = {"nodes": 3, "elastic": {"minNodes": 1}}
    job = make_job(in_phase(Phase.RUNNING, nodes=3, spec=spec), **spec)
    observed = seen(make_pod(0), make_pod(1), make_pod(2))
    decided = plan(job, observed, NOW, replace(DEFAULTS, bounds=Bounds(max_nodes=2)))
    assert (decided.status.phase, decided.status.nodes.total, decided.events) == (Phase.RUNNING, 3, ())


@pytest.mark.parametrize("elastic", [{}, {"elastic": {"minNodes": 1}}], ids=["fixed", "elastic"])
def test_a_job_beyond_a_bound_that_was_created_suspended_is_refused_when_it_resumes(elastic: dict[str, Any]) -> None:
    defaults = replace(DEFAULTS, bounds=Bounds(max_nodes=4))
    created_so = plan(make_job(nodes=8, suspend=True, **elastic), Observed(), NOW, defaults)
    kept = plan(make_job(created_so.status, nodes=8, suspend=True, **elastic), Observed(), NOW, defaults)
    assert (kept.status.phase, cond.find(kept.status.conditions, cond.DEGRADED)) == (Phase.SUSPENDED, None)
    resumed = plan(make_job(kept.status, nodes=8, **elastic), Observed(), NOW, defaults)
    assert (resumed.status.phase, resumed.actions) == (Phase.FAILED, ())


def test_that_an_elastic_job_is_held_back_is_said_for_as_long_as_it_is() -> None:
    spec = {"nodes": 9, "elastic": {"minNodes": 2}}
    status = in_phase(Phase.RUNNING, nodes=2, spec=spec)
    defaults = replace(DEFAULTS, bounds=Bounds(max_nodes=2))
    observed = seen(make_pod(0), make_pod(1))
    first = plan(make_job(status, **spec), observed, NOW, defaults)
    degraded = cond.find(first.status.conditions, cond.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "BeyondBounds")
    assert degraded.message.startswith("spec.nodes: 9 is more than the 2")
    again = plan(make_job(first.status, **spec), observed, NOW, defaults)
    assert again.status.conditions == first.status.conditions


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("2", 2), (2, 2), ("500m", "0.5"), ("1.5Gi", 1610612736), ("1k", 1000), ("1e3", 1000), ("2E", "2e18"),
     ("3Ei", 3 * 1024**6), (".5", "0.5"), ("100n", "1e-7"), ("250u", "0.00025")],
)  # fmt: skip
def test_a_quantity_is_a_number(quantity: str | int, number: Any) -> None:
    assert amount(quantity) == Decimal(number)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1Gb", "one", "1GiB", "NaN", "1_0", "1e999"])
def test_what_is_no_quantity_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)


DEFAULT = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (None, DEFAULT),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}),
        ({"requests": {"memory": "8Gi"}}, {"requests": {"cpu": "1", "memory": "8Gi"}}),
        (GPUS, {"requests": DEFAULT["requests"], "limits": {"memory": "2Gi", "nvidia.com/gpu": 8}}),
    ],
    ids=["nothing", "another resource", "a request alone, which a default limit could be below", "GPUs"],
)
def test_a_resource_that_a_job_does_not_mention_has_its_default(given: Any, filled: Any) -> None:
    assert with_default_resources({"name": "trainer", "resources": given}, DEFAULT)["resources"] == filled


def test_a_resource_of_the_pod_as_a_whole_has_no_default() -> None:
    """The API server refuses a container whose limit is beyond that of its pod."""
    job = make_job(**template(resources={"limits": {"memory": "1Gi"}, "requests": None}))
    (trainer,) = build_pod(admitted(job, Defaults(resources=DEFAULT)), PLACE)["spec"]["containers"]
    assert trainer["resources"] == {"requests": {"cpu": "1"}}


@pytest.mark.parametrize("spec", [{}, template(container(limits={"memory": "9Gi"})), {"resources": GPUS}], ids=str)
def test_defaults_reach_the_trainer_alone(spec: dict[str, Any]) -> None:
    defaults = Defaults(resources={"limits": {"memory": "2Gi"}})
    job = make_job(**spec)
    pod = build_pod(admitted(job, defaults), PLACE)
    (trainer,) = pod["spec"]["containers"]
    assert trainer["resources"]["limits"]["memory"] == ("9Gi" if "podTemplate" in spec else "2Gi")
    assert "resources" not in build_pod(admitted(make_job()), PLACE)["spec"]["containers"][0]
