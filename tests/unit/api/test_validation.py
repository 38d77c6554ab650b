"""The rules between fields: in Python, and in CEL with the same verdict."""

from __future__ import annotations

from functools import cache
from typing import Any

import cel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from ddp_trainer.train.strategies import STRATEGIES as OF_TRAINER
from ddpjob_operator.api.crd import crd
from ddpjob_operator.api.immutable import IMMUTABLE_FIELDS, immutable_digests
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.strategy_rules import STRATEGIES
from ddpjob_operator.api.template_rules import RESERVED_ENV, is_reserved
from ddpjob_operator.api.validation import BETWEEN_FIELDS, problems

ROOT = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SCHEMA = ROOT["properties"]["spec"]


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """`value` as an API server stores it: with the schema's defaults."""
    if isinstance(value, dict) and "properties" in schema:
        value = dict(value)
        for name, field in schema["properties"].items():
            if name not in value and "default" in field:
                value[name] = field["default"]
            if name in value:
                value[name] = defaulted(field, value[name])
    elif isinstance(value, list) and "items" in schema:
        value = [defaulted(schema["items"], item) for item in value]
    return value


compiled = cache(cel.compile)
"""There are some 30 rules, and thousands of values."""


def refusals(schema: dict[str, Any], new: Any, old: Any = None) -> list[str]:
    """What the rules in CEL say: each at its place, transition rules only where there is an old value."""
    found = []
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        if not compiled(rule["rule"]).execute({"self": new, "oldSelf": old}):
            found.append(rule["message"])
    for name, field in schema.get("properties", {}).items():
        if isinstance(new, dict) and name in new:
            found += refusals(field, new[name], old.get(name) if isinstance(old, dict) else None)
    if isinstance(new, list) and "items" in schema:
        found += [refusal for item in new for refusal in refusals(schema["items"], item)]
    return found


def by_cel(spec: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    old = None if before is None else defaulted(SCHEMA, before)
    return refusals(SCHEMA, defaulted(SCHEMA, spec), old)


def by_python(spec: dict[str, Any]) -> tuple[str, ...]:
    return problems(DDPJobSpec.model_validate(spec))


def env(name: str, **fields: Any) -> dict[str, Any]:
    return {"env": [{"name": "FINE", "value": "1"}, {"name": name, **(fields or {"value": "x"})}]}


CODE = {"code": {"configMaps": ["ddpjob-code-1"], "sha256": "0" * 64}}
ELASTIC = {"nodes": 2, "elastic": {"minNodes": 1}}
LIVE = {"restart": {"scope": "Live"}}


def initializer(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "path": "datasets/a", "script": "true", **fields}


def source(name: str, url: str = "s3://b/c", path: str = "datasets/a") -> dict[str, Any]:
    return {"name": name, "path": path, "source": url}


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        pytest.param({}, None, id="nothing said breaks no rule"),
        pytest.param({"entrypoint": {"module": "a"}}, None, id="a module alone is fine"),
        pytest.param({"entrypoint": {"script": "/b"}}, None, id="a script alone is fine"),
        pytest.param({"entrypoint": {"module": "a", "script": "/b"}}, "keep one", id="module and script contradict"),
        pytest.param({"entrypoint": {"script": "b.py"}}, "absolute path", id="a relative script is in no folder"),
        pytest.param({"entrypoint": {"script": "b.py"}, **CODE}, None, id="a relative script is in the folder"),
        pytest.param({"entrypoint": {"script": "/b.py"}, **CODE}, None, id="a script beside the folder is fine"),
        pytest.param({"entrypoint": {"script": "a/../b.py"}, **CODE}, "remove `..`", id="a script leaves its folder"),
        pytest.param(
            {"code": {**CODE["code"], "requirements": "../r.txt"}}, "remove `..`", id="requirements leave the folder"
        ),
        pytest.param({"shared": {"claimName": "c"}}, None, id="a claim alone is fine"),
        pytest.param({"shared": {"size": "1Gi", "storageClassName": "x"}}, None, id="a size and a class are fine"),
        pytest.param({"shared": {"claimName": "c", "size": "1Gi"}}, "size", id="a claim has its size already"),
        pytest.param({"shared": {"claimName": "c", "storageClassName": "x"}}, "storageClassName", id="and its class"),
        pytest.param({"shared": {"scope": "Job"}}, "set claimName", id="a scope without an existing claim"),
        pytest.param({"shared": {"claimName": "c", "scope": "Job"}}, None, id="a scope of a claim is fine"),
        pytest.param(
            {"shared": {"claimName": "c", "scope": "Job"}, "initializers": [initializer("a")]},
            "use another folder",
            id="data sets are read-only with the scope Job",
        ),
        pytest.param(
            {"shared": {"claimName": "c", "scope": "Claim"}, "initializers": [initializer("a")]},
            None,
            id="and writable with the scope Claim",
        ),
        pytest.param(env("A", value="1", valueFrom={"fieldRef": {}}), "keep one", id="a variable has one source"),
        pytest.param(env("MY_RANK"), None, id="a name that only contains a reserved one is fine"),
        pytest.param({"restart": {"backoff": {"initialSeconds": 5, "maxSeconds": 5}}}, None, id="equal waits are fine"),
        pytest.param(
            {"restart": {"backoff": {"initialSeconds": 301}}}, "maxSeconds 300", id="waits in the wrong order"
        ),
        pytest.param(
            {"nodes": 2, "elastic": {"minNodes": 2}}, None, id="an elastic gang may be as small as it is large"
        ),
        pytest.param({"nodes": 2, "elastic": {"minNodes": 3}}, "minNodes: 3", id="the fewest nodes are not the most"),
        pytest.param(
            {**ELASTIC, "args": ["--strategy=pipeline"]}, "same number of ranks", id="a pipeline keeps its ranks"
        ),
        pytest.param(
            {**ELASTIC, "args": ["--strategy", "pipeline"]},
            "same number of ranks",
            id="in two items",
        ),
        pytest.param(
            {**ELASTIC, "args": ["--task", "pipeline", "--strategy=fsdp"]}, None, id="a task may be called pipeline"
        ),
        pytest.param(
            {**ELASTIC, "args": ["--strategy", "ddp", "--task", "pipeline"]}, None, id="so may one of another strategy"
        ),
        pytest.param(
            {**LIVE, "args": ["--tokenizer", "fsdp", "--strategy", "ddp"]}, None, id="a tokenizer, of that name"
        ),
        pytest.param(
            {**ELASTIC, "args": ["--strategy=pipeline"], "entrypoint": {"script": "/own.py"}},
            None,
            id="what the flags of another program mean is its own affair",
        ),
        pytest.param({"args": ["--strategy=pipeline"]}, None, id="a pipeline of one size"),
        pytest.param({**LIVE, "args": ["--strategy=fsdp"]}, "use --strategy hsdp", id="shards that span pods"),
        pytest.param({**LIVE, "args": ["--strategy", "fsdp"]}, "use --strategy hsdp", id="the same in two words"),
        pytest.param({**LIVE, "args": ["--strategy=hsdp"]}, None, id="shards within each pod"),
        pytest.param(
            {**LIVE, "args": ["--strategy=fsdp"], "entrypoint": {"script": "/own.py"}}, None, id="args of a script"
        ),
        pytest.param({"args": ["--strategy=fsdp"]}, None, id="shards without live recovery"),
        pytest.param({"args": ["--strategy=hsdp"]}, "set it to Live", id="no live recovery"),
        pytest.param({"spares": 1, "restart": {"scope": "InPlace"}}, None, id="a spare takes a lost pod's place"),
        pytest.param({"spares": 1, "restart": {"scope": "Live"}}, None, id="and joins those that train on"),
        pytest.param({"spares": 1}, "scope InPlace or Live", id="a gang that is replaced whole has no use for a spare"),
        pytest.param({"stall": {"minSeconds": 9, "maxSeconds": 8}}, "maxSeconds 8", id="stall limits in wrong order"),
        pytest.param({"initializers": [initializer("a"), initializer("b")]}, None, id="two initializers"),
        pytest.param(
            {"initializers": [initializer("a"), initializer("a")]}, "not unique", id="initializers of one name"
        ),
        pytest.param({"initializers": [initializer("a", source="s3://b/c")]}, "both", id="a source and a script"),
        pytest.param({"initializers": [{"name": "a", "path": "p"}]}, "neither", id="neither source nor script"),
        pytest.param({"initializers": [initializer("a", path="a/../b")]}, "a/../b", id="a path out of the volume"),
        pytest.param({"initializers": [initializer("a", path="a..b/c")]}, None, id="dots that lead nowhere"),
        pytest.param({"scheduling": {"gang": "Kueue", "queue": "q"}}, None, id="a queue of Kueue's"),
        pytest.param({"scheduling": {"gang": "Volcano"}}, None, id="Volcano has a queue by default"),
        pytest.param({"scheduling": {"gang": "Kueue"}}, "LocalQueue", id="Kueue without a queue"),
        pytest.param({"scheduling": {"queue": "q"}}, "'q' cannot be used", id="a queue of nobody's"),
        pytest.param(
            {"nodes": 2, "elastic": {"minNodes": 1}, "scheduling": {"gang": "Kueue", "queue": "q"}},
            "all pods or none",
            id="a queue admits no part of a gang",
        ),
        pytest.param(
            {"nodes": 2, "elastic": {"minNodes": 1}, "scheduling": {"gang": "Volcano"}},
            None,
            id="a PodGroup has a least size",
        ),
        pytest.param({"restart": {"windowSeconds": 9, "maxRestarts": 100}}, None, id="a window of a hundred restarts"),
        pytest.param({"restart": {"windowSeconds": 9, "maxRestarts": 101}}, "too high", id="too many for a window"),
        *(
            pytest.param(env(name), name, id=f"{name} is reserved")
            for name in (*RESERVED_ENV, "DDPJOB_X", "TORCHELASTIC_RUN_ID", "PET_NNODES")
        ),
    ],
)
def test_python_and_cel_give_the_same_verdict(spec: dict[str, Any], reported: str | None) -> None:
    in_python, in_cel = by_python(spec), by_cel(spec)
    assert bool(in_python) == bool(in_cel) == (reported is not None)
    assert reported is None or reported in in_python[0]


@pytest.mark.parametrize("args", [["--strategy", "fsdp", "--task", "ddp"], ["--task", "ddp", "--strategy", "fsdp"]])
def test_the_operator_alone_tells_a_strategy_beside_the_name_of_another(args: list[str]) -> None:
    assert "use --strategy hsdp" in by_python({**LIVE, "args": args})[0]
    assert by_cel({**LIVE, "args": args}) == []


def test_the_strategies_are_those_of_the_trainer() -> None:
    assert tuple(OF_TRAINER) == STRATEGIES


names = st.sampled_from(
    ["A", "RANK", "RANKS", "WORLD_SIZE", "DDPJOB_", "DDPJOB", "PET_A", "TORCHELASTIC_A", "LD_PRELOAD"]
)
variables = st.fixed_dictionaries(
    {"name": names}, optional={"value": st.just("v"), "valueFrom": st.just({"fieldRef": {}})}
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 3),
        "elastic": st.fixed_dictionaries({"minNodes": st.integers(1, 3)}),
        "spares": st.integers(0, 1),
        "procsPerNode": st.integers(1, 2),
        "initializers": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["a", "b"]), "path": st.sampled_from(["a", "a/..", "a/..b"])},
                optional={"source": st.just("s3://b/c"), "script": st.just("true")},
            ),
            max_size=2,
        ),
        "stall": st.fixed_dictionaries({}, optional={"minSeconds": st.integers(1, 2000)}),
        "scheduling": st.fixed_dictionaries(
            {}, optional={"gang": st.sampled_from(["None", "Kueue", "Volcano"]), "queue": st.just("q")}
        ),
        "image": st.sampled_from(["a", "b"]),
        "args": st.lists(st.sampled_from(["a", "b"]), max_size=2),
        "entrypoint": st.fixed_dictionaries(
            {}, optional={"module": st.just("m"), "script": st.sampled_from(["/s", "s", "../s"])}
        ),
        "code": st.just(CODE["code"]),
        "env": st.lists(variables, max_size=2),
        "shared": st.fixed_dictionaries(
            {},
            optional={
                "claimName": st.just("c"),
                "size": st.just("1Gi"),
                "storageClassName": st.just("s"),
                "retain": st.booleans(),
            },
        ),
        "restart": st.fixed_dictionaries(
            {},
            optional={
                "maxRestarts": st.sampled_from([0, 1, 101]),
                "windowSeconds": st.integers(1, 2),
                "scope": st.sampled_from(["Gang", "InPlace"]),
                "backoff": st.fixed_dictionaries(
                    {}, optional={"initialSeconds": st.integers(0, 400), "maxSeconds": st.integers(0, 400)}
                ),
            },
        ),
        "snapshots": st.fixed_dictionaries({}, optional={"keep": st.integers(1, 2)}),
        "resources": st.fixed_dictionaries({}, optional={"limits": st.just({"cpu": 1})}),
        "podTemplate": st.fixed_dictionaries({}, optional={"spec": st.sampled_from([{}, {"priorityClassName": "p"}])}),
    },
)


@settings(max_examples=examples(150), deadline=None)
@given(specs)
def test_python_and_cel_agree_on_every_spec(spec: dict[str, Any]) -> None:
    of_both = problems(DDPJobSpec.model_validate(spec), has_begun=True)
    assert bool(of_both) == bool(by_cel(spec))


IMMUTABLE = " is immutable: "


@settings(max_examples=examples(150), deadline=None)
@given(specs, specs)
def test_an_edit_that_cel_lets_through_leaves_every_digest_as_it_was(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    refused = {message.partition(" ")[0] for message in by_cel(after, before) if IMMUTABLE in message}
    old, new = (immutable_digests(DDPJobSpec.model_validate(spec)) for spec in (before, after))
    changed = {f"spec.{name}" for name in IMMUTABLE_FIELDS if old[name] != new[name]}
    if "spec.elastic" in changed:
        refused.add("spec.nodes")  # which is frozen or not by what elastic says
        changed.add("spec.nodes")
    assert changed <= refused
    # an empty object that comes or goes is refused by a server and means the same to the operator
    assert refused - changed <= {"spec.resources", "spec.podTemplate", "spec.procsPerNode"}


@pytest.mark.parametrize("field", IMMUTABLE_FIELDS)
def test_each_frozen_field_has_a_digest_of_its_own(field: str) -> None:
    edits = {
        "image": "b", "entrypoint": {"module": "m"}, "args": ["a"], "nodes": 2, "procsPerNode": 2,
        "resources": {"limits": {"cpu": 1}}, "env": [{"name": "A", "value": "1"}], "shared": {"size": "1Gi"},
        "podTemplate": {"spec": {"priorityClassName": "p"}}, "elastic": {"minNodes": 1}, "successPolicy": "FirstNode",
        "initializers": [{"name": "data", "script": "true", "path": "datasets/data"}], "managedBy": "another.io/one",
        "scheduling": {"gang": "Coscheduling"}, "placement": {"onePodPerNode": True}, **CODE,
    }  # fmt: skip
    before = immutable_digests(DDPJobSpec())
    after = immutable_digests(DDPJobSpec.model_validate({field: edits[field]}))
    assert [name for name in IMMUTABLE_FIELDS if before[name] != after[name]] == [field]


def test_what_may_change_while_running_has_no_digest() -> None:
    after = DDPJobSpec.model_validate({"restart": {"maxRestarts": 1}, "snapshots": {"keep": 9}})
    assert immutable_digests(after) == immutable_digests(DDPJobSpec())


def test_a_default_that_is_written_out_is_no_edit() -> None:
    """Servers write defaults into the object."""
    written = {"nodes": 1, "shared": {"retain": True, "accessMode": "ReadWriteMany"}, "args": [], "entrypoint": {}}
    assert immutable_digests(DDPJobSpec.model_validate(written)) == immutable_digests(DDPJobSpec())


def test_a_default_has_no_part_in_a_digest_so_that_an_operator_may_know_more_of_them_than_the_one_before() -> None:
    assert len(set(immutable_digests(DDPJobSpec()).values())) == 1, "the digest of nothing"


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


EIGHT_GPUS: dict[str, Any] = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 8}}}


def template(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        (template(containers=[{"name": "trainer", "env": [{"name": "RANK", "value": "0"}]}]),
         "spec.podTemplate.spec.containers[0].env: RANK is reserved for the operator; remove it"),
        (template(containers=[{"name": "logs"}, {"name": "trainer", "env": [{"name": "LD_PRELOAD"}]}]),
         "spec.podTemplate.spec.containers[1].env: LD_PRELOAD is reserved for the operator; remove it"),
        (template(containers=[{"name": "logs", "env": [{"name": "RANK"}]}]), None),
        (template(containers=[{"name": "trainer", "restartPolicy": "Always"}]),
         "spec.podTemplate.spec.containers[0].restartPolicy: the operator restarts the ranks together; remove it, and "
         "use spec.restart"),
        (template(containers=[{"name": "trainer", "restartPolicy": "Never", "restartPolicyRules": []}]), None),
        (template(containers=[{"name": "logs", "restartPolicy": "OnFailure"}]), None),
        (template(containers=[{"name": "logs", "restartPolicyRules": [{"action": "Restart"}]}]), None),
        (template(initContainers=[{"name": "watch", "restartPolicyRules": [{"action": "RestartAllContainers"}]}]),
         "spec.podTemplate.spec.initContainers[0].restartPolicyRules: RestartAllContainers would restart the ranks of "
         "one pod; remove it, and use spec.restart"),
        (template(activeDeadlineSeconds=3600),
         "spec.podTemplate.spec.activeDeadlineSeconds: 3600 ends each pod, and the job restarts; remove it, and use "
         "spec.activeDeadlineSeconds"),
        (template(containers=[EIGHT_GPUS]),
         "spec.podTemplate.spec.containers[0].resources.limits: nvidia.com/gpu: 8 would have one rank; set "
         "spec.procsPerNode: 8"),
        (template(containers=[EIGHT_GPUS]) | {"procsPerNode": 1}, None),
        (template(containers=[EIGHT_GPUS | {"name": "render"}]), None),
        (template(containers=[EIGHT_GPUS]) | {"resources": {"limits": {"nvidia.com/gpu": 8}}}, None),
        ({"resources": {"limits": {"habana.ai/gaudi": "8"}}},
         "spec.resources.limits: habana.ai/gaudi: 8 would have one rank; set spec.procsPerNode: 8"),
        ({"resources": {"limits": {"gpu.intel.com/xe": 1, "nvidia.com/mig-1g.5gb": 2}}}, None),
        (template(volumes=[{"name": "tmp", "emptyDir": {}}, {"name": "shared", "emptyDir": {}}]),
         "spec.podTemplate.spec.volumes[1].name: the operator's volume shared has the job's data; give this one "
         "another name, or remove it"),
        (template(volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": "data"}}]),
         "spec.podTemplate.spec.volumes[0].name: the operator's volume shared has the job's data"),
        (template(volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": "data"}}])
         | {"shared": {"claimName": "data"}}, None),
        (template(volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": "data", "readOnly": False}}])
         | {"shared": {"claimName": "data"}}, None),
        (template(volumes=[{"name": "shared", "persistentVolumeClaim": "data"}]) | {"shared": {"claimName": "data"}},
         "spec.podTemplate.spec.volumes[0].name: the operator's volume shared has the job's data"),
        (template(volumes=[{"name": "assignment", "emptyDir": {}}]),  # restart.scope may change
         "spec.podTemplate.spec.volumes[0].name: the operator's volume assignment has the pod's place in the gang"),
        (template(volumes=[{"name": "assignment", "emptyDir": {}}]) | {"restart": {"scope": "InPlace"}},
         "spec.podTemplate.spec.volumes[0].name: the operator's volume assignment has the pod's place in the gang"),
        (template(containers=[{"image": "x"}]), "spec.podTemplate.spec.containers[0]: must have a name"),
        (template(containers=["x"]), "spec.podTemplate.spec.containers[0]: must have a name"),
        (template(containers={"name": "x"}), "spec.podTemplate.spec.containers: must be a list"),
        (template(containers="x"), "spec.podTemplate.spec.containers: must be a list"),
        (template(initContainers=[{}]), "spec.podTemplate.spec.initContainers[0]: must have a name"),
        (template(volumes=[1]), "spec.podTemplate.spec.volumes[0]: must have a name"),
        (template(schedulingGates=1), "spec.podTemplate.spec.schedulingGates: must be a list"),
        (template(affinity=[]), "spec.podTemplate.spec.affinity: must be an object"),
        (template(affinity={"podAffinity": "x"}), "spec.podTemplate.spec.affinity.podAffinity: must be an object"),
        (template(affinity={"podAntiAffinity": {REQUIRED: {}}}),
         f"spec.podTemplate.spec.affinity.podAntiAffinity.{REQUIRED}: must be a list"),
        (template(affinity={"nodeAffinity": {REQUIRED: []}}),
         f"spec.podTemplate.spec.affinity.nodeAffinity.{REQUIRED}: must be an object"),
        (template(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": 1}]}}}),
         f"spec.podTemplate.spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0]: must be an affinity term"),
        (template(containers=[{"name": "trainer", "env": [1]}]),
         "spec.podTemplate.spec.containers[0].env[0]: must have a name"),
        (template(containers=[{"name": "trainer", "ports": [{"name": "x"}]}]),
         "spec.podTemplate.spec.containers[0].ports[0]: must have a containerPort"),
        (template(containers=[{"name": "trainer", "resources": {"limits": ["x"]}}]),
         "spec.podTemplate.spec.containers[0].resources.limits: must be an object"),
        (template(containers=[{"name": "trainer", "resources": 1}]),
         "spec.podTemplate.spec.containers[0].resources.limits: must be"),
        (template(containers=None, volumes=None), None),
        (template(), None),
    ],
    ids=["a reserved variable for the trainer", "the second container", "a sidecar's variables are its own",
         "a trainer that is restarted alone", "a trainer that is not", "a sidecar may be",
         "a sidecar may be by a rule", "all containers by a rule of one", "a deadline of each pod",
         "GPUs that have no ranks", "one rank with all of them", "GPUs of a sidecar", "GPUs that are counted elsewhere",
         "accelerators that are not counted", "one, and parts of one",
         "the name of the job's volume", "that name with another claim", "that name with the same claim",
         "that name with the same claim and an option", "that name with a claim that is text",
         "a name that restart.scope Gang leaves free", "the name of the volume with the place in the gang",
         "a container without a name", "a container that is no object", "containers that are an object",
         "containers that are text", "an init container without a name", "a volume that is no object",
         "scheduling gates that are a number",
         "an affinity that is a list", "an affinity to pods that is text", "terms that are an object",
         "terms for nodes that are a list", "expressions that are a number",
         "a variable that is no object", "a port without a number", "limits that are a list",
         "resources that are a number", "nothing said as null", "an empty template"],
)  # fmt: skip
def test_a_template_that_cannot_be_merged_is_refused_in_words(spec: dict[str, Any], reported: str | None) -> None:
    found = by_python(spec)
    assert found[0].startswith(reported) if reported else found == ()


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        pytest.param({"initializers": [source("a", "pvc://c")]}, None, id="all of a claim"),
        pytest.param({"initializers": [source("a", "pvc://c/b")]}, None, id="a path of a claim"),
        pytest.param(
            {"initializers": [source("a", "pvc:///b")]}, "write pvc://claim/path", id="a source without claim"
        ),
        pytest.param({"initializers": [source("a", "pvc://A_b/c")]}, "write pvc://claim/path", id="no name of a claim"),
        pytest.param({"initializers": [source("a"), source("b")]}, "that of 'a' too", id="two sources for one path"),
        pytest.param(
            {"initializers": [source("a"), source("b", path="datasets/a/")]}, "that of 'a'", id="with a slash"
        ),
        pytest.param({"initializers": [initializer("a"), source("b")]}, "that of 'a' too", id="a source over a script"),
        pytest.param({"initializers": [source("a"), initializer("b")]}, None, id="a script adds to a source"),
        pytest.param(
            {"initializers": [source("a", path="data/a"), source("b", path="data")]},
            "spec.initializers[1].path: 'data' holds that of 'a', whose result this source would replace",
            id="a source over the folder of another",
        ),
        pytest.param(
            {"initializers": [source("b", path="data"), source("a", path="data/a")]}, None, id="one within another"
        ),
        pytest.param({"initializers": [source("a", path="data-a"), source("b", path="data")]}, None, id="beside"),
        pytest.param({"initializers": [initializer("a", script="数" * 42_000)]}, None, id="a long script"),
        pytest.param(
            {"initializers": [initializer("a", script="数" * 43_000)]},
            "spec.initializers[0].script: takes 129049 bytes as JSON",
            id="a script that its process cannot be given",
        ),
        pytest.param({"initializers": [initializer("a", script="'\n" * 32_768)]}, None, id="65,536 characters"),
    ],
)
def test_a_job_does_not_begin_with_initializers_that_cannot_do_what_they_say(
    spec: dict[str, Any], reported: str | None
) -> None:
    found = by_python(spec)
    assert reported in found[0] if reported else found == ()
    assert problems(DDPJobSpec.model_validate(spec), has_begun=True) == (), "jobs of an earlier version go on"


def test_a_pattern_that_cannot_be_compiled_is_refused_by_the_operator() -> None:
    """CEL has no way to ask whether a text is a pattern."""
    rules = [{"action": "Fail", "messagePattern": "CUDA error|ECC"}, {"action": "Fail", "messagePattern": "(a"}]
    (problem,) = by_python({"restart": {"rules": rules}})
    assert problem.startswith(
        "spec.restart.rules[1].messagePattern: '(a' is not a valid regular expression (RE2 syntax): missing )"
    )


def test_an_elastic_gang_may_be_scaled_and_another_may_not() -> None:
    elastic = {"elastic": {"minNodes": 1}}
    assert by_cel({"nodes": 3} | elastic, {"nodes": 2} | elastic) == []
    assert by_cel({"nodes": 3}, {"nodes": 2})[0].startswith("spec.nodes is immutable")
    same = [immutable_digests(DDPJobSpec.model_validate({"nodes": nodes} | elastic)) for nodes in (2, 3)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ({}, 1),
        ({"procsPerNode": 4}, 4),
        ({"resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 4}}}, 8),
        ({"resources": {"limits": {"amd.com/gpu": "2"}}}, 2),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}, "procsPerNode": 1}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, 1),
    ],
    ids=["nothing said", "said", "one for each GPU", "of any make", "what is said counts", "none is still one rank"],
)
def test_a_node_has_a_rank_for_each_of_its_gpus(spec: dict[str, Any], ranks: int) -> None:
    assert DDPJobSpec.model_validate(spec).ranks_per_node == ranks


@pytest.mark.parametrize(
    ("spec", "accelerators"),
    [
        pytest.param(template(containers=[EIGHT_GPUS]) | {"procsPerNode": 8}, 8, id="of the template"),
        pytest.param(
            template(containers=[EIGHT_GPUS]) | {"resources": {"limits": {"nvidia.com/gpu": 4}}}, 4, id="spec wins"
        ),
        pytest.param(
            template(containers=[EIGHT_GPUS | {"name": "sidecar"}, {"name": "trainer", "resources": {}}]),
            0,
            id="of another container",
        ),
        pytest.param({"resources": {"limits": {"habana.ai/gaudi": 8}}, "procsPerNode": 8}, 8, id="of another name"),
        pytest.param(template(containers=[{"name": "trainer", "resources": {"limits": []}}]), 0, id="malformed"),
        pytest.param({"resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 4}}, "procsPerNode": 1}, 8, id="one rank"),
    ],
)
def test_a_node_holds_the_accelerators_of_its_trainer_container(spec: dict[str, Any], accelerators: int) -> None:
    assert DDPJobSpec.model_validate(spec).accelerators_per_node == accelerators


def test_a_count_of_thousands_of_digits_is_no_error() -> None:
    """An API server takes it: it bounds the form of a quantity, and not its length."""
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "9" * 5000}}}
    assert problems(DDPJobSpec.model_validate(template(containers=[container]))) == ()


def test_every_rule_stands_in_the_schema_where_it_says() -> None:
    for rule in (rule for rule in BETWEEN_FIELDS if rule.cel):
        node = SCHEMA
        for part in rule.path:
            node = node["items"] if part == "[]" else node["properties"][part]
        assert {"rule": rule.cel, "message": rule.message} in node["x-kubernetes-validations"]


def test_reserved_names_are_told_from_those_that_only_look_like_them() -> None:
    assert is_reserved("DDPJOB_ANYTHING")
    assert not is_reserved("NCCL_DEBUG")


def test_a_pattern_that_takes_much_memory_to_compile_is_refused() -> None:
    (problem,) = by_python({"restart": {"rules": [{"action": "Fail", "messagePattern": r"(\pL|\pN|\pS){300}"}]}})
    assert problem.endswith("is not a valid regular expression (RE2 syntax): pattern too large - compile failed")
