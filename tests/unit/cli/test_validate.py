"""What `ddpjob validate` says beyond the schema of a DDPJob, and what it survives."""

from __future__ import annotations

import io
import json
import resource
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob_operator.cli.job_file import check_files

ROOT = Path(__file__).parents[3]
CPU_SECONDS, MEMORY_BYTES = 10, 1 << 30


def job(name: str = "digits", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def written(tmp_path: Path, *documents: Any, name: str = "job.yaml") -> str:
    file = tmp_path / name
    file.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return str(file)


def problems(tmp_path: Path, document: Any) -> list[str]:
    """What is said of a document, without file and line."""
    found = check_files([written(tmp_path, document)]).problems
    return [problem.partition(": ")[2] for problem in found]


def template(**spec: Any) -> dict[str, Any]:
    return job(podTemplate={"spec": spec})


POD = "spec.podTemplate.spec"
CASES = [
    (template(nodeSelectorr={"a": "b"}),
     f"{POD}.nodeSelectorr: is not a field of a PodSpec; did you mean nodeSelector?"),
    (template(nodeSelector={"gpu": True}), f'{POD}.nodeSelector[gpu]: true is not text; write it in quotes: "true"'),
    (template(hostNetwork="yes"),
     f'{POD}.hostNetwork: "yes" is not true or false; write true or false, without quotes'),
    (template(tolerations={"key": "gpu"}),
     f'{POD}.tolerations: {{"key": "gpu"}} is not a list; write one item a line, each after a dash'),
    (template(tolerations=[{"key": "gpu", "effect": "NoScheduling"}]),
     f'{POD}.tolerations[0].effect: "NoScheduling" is not allowed; use NoSchedule, PreferNoSchedule, NoExecute'),
    (template(volumes=[{"name": "scratch", "emptyDir": {"sizeLimit": "10 GB"}}]),
     f'{POD}.volumes[0].emptyDir.sizeLimit: "10 GB" is not a quantity; write one such as 2, 500m, 16Gi'),
    (template(volumes=[{"name": "data", "persistentVolumeClaim": {}}]),
     f"{POD}.volumes[0].persistentVolumeClaim.claimName: is missing; set it"),
    (template(containers=[{"name": "trainer", "securityContext": {"runAsUser": "root"}}]),
     f'{POD}.containers[0].securityContext.runAsUser: "root" is not a whole number; write a whole number'),
    (template(containers=[{"name": "trainer", "volumeMounts": [{"mountPath": "/data"}]}]),
     f"{POD}.containers[0].volumeMounts[0].name: is missing; set it"),
    (template(containers=[{"name": "side", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}]),
     f'{POD}.containers[0].resources.requests[cpu]: "2" is more than the limit 1; lower it, or raise limits'),
    (job(podTemplate={"metadata": {"labels": {"team": "a team"}}}),
     'spec.podTemplate.metadata.labels[team]: "a team" is no label value; '
     "use up to 63 letters, digits, -, _ and ."),
    (job() | {"metadata": {"name": "digits", "labels": 3}},
     "metadata.labels: 3 is not an object; write its fields below it, indented"),
    (job() | {"metadata": {"name": "digits", "annotations": {"cost": 3}}},
     'metadata.annotations[cost]: 3 is not text; write it in quotes: "3"'),
    (job(resources={"requests": {"memory": "32Gi"}, "limits": {"memory": "16Gi"}}),
     'spec.resources.requests[memory]: "32Gi" is more than the limit 16Gi; lower it, or raise limits'),
    (job(resources={"limits": {"nvidia.com/gpu": "500m"}}),
     'spec.resources.limits[nvidia.com/gpu]: "500m" is not a whole number; nvidia.com/gpu cannot be shared'),
    (job(resources={"requests": {"nvidia.com/gpu": 1}}),
     "spec.resources.requests[nvidia.com/gpu]: 1 must be set in limits too, to the same; set only limits"),
    (job(resources={"limits": {"memory": "512m"}}),
     'spec.resources.limits[memory]: "512m" is less than a byte; write such as 512Mi'),
    (job(procsPerNode=16, resources={"limits": {"nvidia.com/gpu": 8}}),
     "spec.procsPerNode: 16 is more than the 8 nvidia.com/gpu in limits; start at most one rank a GPU"),
    (job(args=["--strategy", "fspd"]), 'spec.args[1]: --strategy "fspd" is not allowed; did you mean fsdp?'),
    (job(args=["--epoch", "3"]), "spec.args[0]: --epoch is not a flag of the built-in trainer; did you mean --epochs?"),
    (job(args=["--epochs=three"]), 'spec.args[0]: --epochs "three" is not a whole number; write one'),
    (job(args=["--lr"]), "spec.args[0]: --lr needs a value; write it as the next item, or as --lr=VALUE"),
    (job(args=["--lr 1e-3"]),
     "spec.args[0]: --lr 1e-3 is not a flag of the built-in trainer; did you mean --lr?"),
    (job(args=["--task", "digit"]), 'spec.args[1]: --task "digit" is not a built-in task; did you mean digits?'),
    (job(args=["--compile=yes"]), "spec.args[0]: --compile=yes takes no value; write --compile, or --no-compile"),
    (job(args=["digits"]), 'spec.args[0]: "digits" is not a flag; the built-in trainer takes flags and their values'),
    (job(nodes=3), "spec.nodes: --global-batch 64 cannot be divided among 3 ranks; use 63 or 66"),
    (job(nodes=2, args=["--strategy", "single"]),
     "spec.nodes: --strategy single trains on one rank, and the job has 2; use --strategy ddp"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "problem"), CASES, ids=[problem[:60] for _, problem in CASES])
def test_a_mistake_beyond_the_schema_is_named_with_field_value_and_fix(
    tmp_path: Path, document: dict[str, Any], problem: str
) -> None:
    assert problems(tmp_path, document) == [problem]


@pytest.mark.parametrize(
    "document",
    [
        job(args=["--task", "my.module:build", "--lr", "0.001", "--no-deterministic", "--task-options", "a=1"]),
        job(args=["--task", "entry_point_of_the_image", "--momentum", "-0.5"]),
        job(entrypoint={"script": "/workspace/train.py"}, args=["--epoch", "3", "anything"]),
        job(nodes=3, args=["--config", "/workspace/run.yaml"]),
        job(nodes=3, procsPerNode=8, args=["--global-batch", "72"], resources={"limits": {"nvidia.com/gpu": 8}}),
        job(resources={"requests": {"cpu": "500m", "memory": "16Gi"}, "limits": {"cpu": 2, "memory": "16Gi"}}),
        template(
            nodeSelector={"pool": "gpu"},
            dnsPolicy="",
            tolerations=[{"operator": "Exists", "effect": ""}, {"key": "sla", "operator": "Gt", "value": "900"}],
            volumes=[{"name": "cache", "emptyDir": {"medium": "Memory", "sizeLimit": "1.5Gi"}}],
            containers=[
                {"name": "trainer", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]},
                {"name": "side", "image": "busybox", "ports": [{"containerPort": 80}],
                 "livenessProbe": {"httpGet": {"port": "http"}}},
            ],
        ),
    ],
    ids=["flags", "entry point", "own script", "config file", "ranks", "resources", "template"],
)  # fmt: skip
def test_what_would_work_is_valid(tmp_path: Path, document: dict[str, Any]) -> None:
    assert problems(tmp_path, document) == []


MERGED = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: digits, annotations: {date: 2026-01-01, time: 2026-01-01T00:00:00Z}}
spec:
  resources:
    limits:
      <<: {cpu: 2, memory: 16Gi}
      memory: 8Gi
    requests:
      memory: 32Gi
"""


def test_what_a_merge_key_brings_may_be_replaced_and_a_date_is_text_as_for_kubectl(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MERGED)
    line = MERGED.splitlines().index("      memory: 32Gi") + 1
    assert check_files([str(tmp_path / "job.yaml")]).problems == (
        f'{tmp_path}/job.yaml:{line}: spec.resources.requests[memory]: "32Gi" is more than the limit 8Gi; '
        "lower it, or raise limits",
    )


def test_a_value_that_json_does_not_have_is_shown(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "kind: DDPJob\nmetadata: {name: digits, labels: {a: {? !!binary aGk= : 1}}}\nspec: {nodes: 1}\n"
    )
    found = check_files([str(tmp_path / "job.yaml")]).problems
    assert any("metadata.labels[a]: {b'hi': 1} is not text" in line for line in found), found


@pytest.mark.parametrize("sample", sorted((ROOT / "manifests/samples").rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_samples_are_valid(sample: Path) -> None:
    found = check_files([str(sample)]).problems
    assert [problem for problem in found if "no document of kind" not in problem] == []


def test_the_tables_are_up_to_date() -> None:
    assert runpy.run_path(str(ROOT / "docs/validate_tables.py"))["main"](["--check"]) == 0


def test_all_problems_of_all_files_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path, job(nodes=0, args=["--epoch", "3"]), job("other"), name="a.yaml")
    second = written(tmp_path, job("other", podTemplate={"spec": {"containerz": []}}), name="b.yaml")
    third = written(tmp_path, job("other"), name="c.yaml")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(job("piped")).encode())))
    checked = check_files([first, second, third, "-", str(tmp_path / "none.yaml")])
    assert [(Path(name).name, one.name) for name, one in checked.valid] == [("a.yaml", "other"), ("-", "piped")]
    assert [problem.replace(f"{tmp_path}/", "") for problem in checked.problems] == [
        "a.yaml:6 (document 1): spec.nodes: 0 is too small; use 1 or more",
        "a.yaml:8 (document 1): spec.args[0]: --epoch is not a flag of the built-in trainer; did you mean --epochs?",
        "b.yaml:8: spec.podTemplate.spec.containerz: is not a field of a PodSpec; did you mean containers?",
        "c.yaml:4: metadata.name: other is the name of the job at a.yaml:14 (document 2), too; rename one of them",
        "none.yaml: No such file or directory; name a YAML file with a DDPJob",
    ]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


HOSTILE = {
    "aliases that multiply": (BOMB, "values with its aliases"),
    "merges that multiply": (MERGES, "values with its aliases"),
    "a cycle": ("spec: &a\n  args: *a\n", ":2: *a contains itself; remove the alias"),
    "depth in a line": ("a: " + "[" * 5000 + "]" * 5000, ":1: is nested deeper than 64 levels"),
    "depth": ("".join(" " * n + "a:\n" for n in range(900)), "is nested deeper than 64 levels"),
    "many values": ("a: [" + "1, " * 300_000 + "]", "values with its aliases"),
    "a large file": ("a: " + "x" * (2 << 20), "is larger than 1 MiB"),
    "an alias of nothing": ("a: *nowhere\n", "is not valid YAML: "),
    "a date that is none": ("a: !!timestamp 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
    "a date that is a word": ("a: !!timestamp soon\n", "is not valid YAML: "),
    "a truth that is none": ("a: !!bool maybe\n", "is not valid YAML: 'maybe'"),
    "a number that is empty": ('a: !!int ""\n', "is not valid YAML: string index out of range; write the value"),
    "a tag of Python's": ("a: !!python/object/apply:os.system [true]\n", "is not valid YAML: "),
    "a key that is a list": ("? [a, b]\n: 1\n", "is not valid YAML: "),
}


@pytest.mark.processes
def test_hostile_files_are_refused_in_bounded_time_and_memory(tmp_path: Path) -> None:
    for name, (text, _) in HOSTILE.items():
        (tmp_path / name).write_text(text)
    script = """
        import json, sys
        from ddpjob_operator.cli.job_file import check_files
        print(json.dumps({name: check_files([name]).problems for name in sys.argv[1:]}))
    """

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *HOSTILE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "operator")},
        preexec_fn=limited,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name, (problem,) in json.loads(done.stdout).items():
        assert problem.startswith(name)
        assert HOSTILE[name][1] in problem
