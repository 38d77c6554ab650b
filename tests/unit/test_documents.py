"""Documents are true: links resolve, YAML is valid, commands and settings exist, terms are those of the glossary. So
are messages that name values of the chart.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ddpjob_operator import settings, tenancy
from ddpjob_operator.api import API_VERSION, KIND
from ddpjob_operator.api.status import Phase
from ddpjob_operator.cli.main import app
from ddpjob_operator.core.manifests.allow_lists import SETTINGS
from ddpjob_operator.core.values.job import Bounds
from ddpjob_operator.core.values.names import FINALIZER
from ddpjob_operator.wire.jobs import parse_job

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    ROOT / line
    for line in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / line).exists()
)
GENERATED = {
    "docs/api.md",
    "docs/correctness.md",
    "docs/metrics.md",
    "docs/reliability.md",
    "docs/conditions.md",
    "charts/ddpjob-operator/README.md",
}
WRITTEN = [page for page in PAGES if str(page.relative_to(ROOT)) not in GENERATED]

PRIVATE = re.compile(r"\b(told|scene|lives on|nobody needs|whoever|it does where|its kin)\b", re.IGNORECASE)
"""Paraphrases for which the field has a term (docs/glossary.md)."""

_FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SETTINGS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs/settings.md").read_text().splitlines()
    if line.startswith("| `DDPJOB_OPERATOR_")
]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path, *languages: str) -> list[str]:
    return [text for info, text in _FENCE.findall(page.read_text()) if (info.split() or [""])[0] in languages]


def _anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text())
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)
    }


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_lines_wrap_at_120(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_no_word_has_to_be_translated(page: Path) -> None:
    assert PRIVATE.findall(page.read_text()) == []


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_job_in_a_document_is_valid(page: Path) -> None:
    for block in _blocks(page, "yaml"):
        document = yaml.safe_load(block)
        if isinstance(document, dict) and document.get("kind") == KIND:
            parse_job(document, strict=True)


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_make_target_in_a_document_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`|= ?)(?:[A-Z_]+=\S* )*make ((?:[a-z][a-z-]* ?)+)", page.read_text(), re.M))
    assert {target for names in named for target in names.split()} <= targets


def test_what_is_removed_by_hand_from_a_pod_is_the_operators_finalizer_alone() -> None:
    """Kueue has one of its own on the pods of a group, by which it knows how they end."""
    (script,) = (text for text in _blocks(ROOT / "docs/upgrading.md", "sh") if "finalizers" in text)
    assert f'eq $held "{FINALIZER}"' in script
    (patch,) = re.findall(r'--patch "(.+?[^\\])"\n', script, re.DOTALL)
    place = "/metadata/finalizers/1"
    assert json.loads(patch.replace('\\"', '"').replace("$index", "1")) == [
        {"op": "test", "path": place, "value": FINALIZER},
        {"op": "remove", "path": place},
    ]


def test_an_uninstallation_without_helm_keeps_the_jobs() -> None:
    """`kubectl delete -k` of an overlay would delete the CRD, and with it every DDPJob."""
    (script,) = (text for text in _blocks(ROOT / "docs/upgrading.md", "sh") if "delete -k" in text)
    assert re.findall(r"delete -k (\S+)", script) == ["manifests/policies"]


def test_gitops_tools_know_every_phase() -> None:
    argo, flux, _ = (yaml.safe_load(text) for text in _blocks(ROOT / "docs/operating.md", "yml") if KIND in text)
    (lua,) = argo["data"].values()
    assert set(argo["data"]) == {f"resource.customizations.health.{API_VERSION.partition('/')[0]}_{KIND}"}
    assert set(re.findall(r'phase == "(\w+)"', lua)) == {Phase.FAILED, Phase.SUCCEEDED, Phase.SUSPENDED}
    (check,) = flux["spec"]["healthCheckExprs"]
    assert (check["apiVersion"], check["kind"]) == (API_VERSION, KIND)
    named = {each: re.findall(r"([!=]=) '(\w+)'", check[each]) for each in ("failed", "current")}
    assert named == {"failed": [("==", Phase.FAILED)], "current": [("!=", Phase.FAILED)]}


def test_gitops_tools_leave_the_size_of_a_job_to_what_scales_it() -> None:
    *_, application = (yaml.safe_load(text) for text in _blocks(ROOT / "docs/operating.md", "yml") if KIND in text)
    (ignored,) = application["spec"]["ignoreDifferences"]
    assert (ignored["group"], ignored["kind"]) == (API_VERSION.partition("/")[0], KIND)
    crd = (ROOT / "manifests/crd/ddpjobs.training.ddpjob.io.yaml").read_text()
    (scaled,) = re.findall(r"specReplicasPath: (\S+)", crd)
    assert ignored["jsonPointers"] == [scaled.replace(".", "/")]
    # else the difference is not shown, and yet undone by the next sync
    assert application["spec"]["syncPolicy"]["syncOptions"] == ["RespectIgnoreDifferences=true"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


NOT_ON_THE_TOUR = {
    "dashboard": "it serves pages until it is stopped; docs/pictures shows them",
    "drain-node": "it would evict the operator, or the job, from one of the two nodes of the tour",
}
"""Verbs of which docs/tour.md has no transcript, and why."""


def _verbs(command: Any, before: str = "") -> Iterator[str]:
    """Those that the help of `ddpjob` lists, with the verbs of groups."""
    for name, verb in command.commands.items():
        if hasattr(verb, "commands"):
            yield from _verbs(verb, f"{name} ")
        elif not verb.hidden:
            yield before + name


def test_the_tour_has_a_transcript_of_every_verb() -> None:
    verbs = set(_verbs(typer.main.get_command(app)))
    # what <TAB> offers is no transcript, and a script for the shell is not printed there
    typed = [
        block.partition("\n")[0].partition("ddpjob ")[2]
        for block in _blocks(ROOT / "docs/tour.md", "console")
        if "<TAB>" not in block and (block.strip().count("\n") or "<(ddpjob completion" in block)
    ]
    shown = {verb for verb in verbs for words in typed if f"{words} ".startswith(f"{verb} ")}
    assert verbs - shown == NOT_ON_THE_TOUR.keys()


def test_every_setting_of_the_operator_is_documented_with_its_default() -> None:
    documented = {name.strip("`").removeprefix(settings.PREFIX): default.strip("`") for name, default, *_ in _SETTINGS}
    assert documented.keys() == settings._READERS.keys()
    for name in documented.keys() - {"LEASE_NAMESPACE", "IDENTITY"}:
        value = getattr(settings.Settings(), name.lower())
        value = ",".join(value) if isinstance(value, tuple) else value
        shown = f"{value:g}" if isinstance(value, float) else str(value if isinstance(value, int) else value or "")
        assert documented[name].lower() == shown.lower(), name


def test_the_settings_that_the_chart_does_not_take_are_named() -> None:
    """Helm refuses them in `settings`: what the chart has made of them is in its templates too."""
    schema = json.loads((ROOT / "charts/ddpjob-operator/values.schema.json").read_text())
    taken = schema["properties"]["settings"]["propertyNames"]["enum"]
    without_value = {name.strip("`") for name, *_, meaning in _SETTINGS if "Chart: " not in meaning}
    (said,) = re.findall(r"\. ([^.]+) cannot be set with the chart\.", (ROOT / "docs/settings.md").read_text())
    named = {f"{settings.PREFIX}{name}" for name in re.findall(r"`(\w+)`", said)}
    assert named == without_value - {f"{settings.PREFIX}{name}" for name in taken}


@pytest.mark.parametrize(
    ("variable", "allowed"), [(row[0].strip("`"), row[2]) for row in _SETTINGS if " to " in row[2]]
)
def test_the_documented_range_of_a_setting_is_the_one_that_is_read(variable: str, allowed: str) -> None:
    low, high = allowed.split(" to ")
    most = {f"{settings.PREFIX}SHARDS": "32"}  # or there is no shard but 0
    for value in (low, high):
        settings.load(most | {variable: value})
    with pytest.raises(settings.BadSetting):
        settings.load(most | {variable: str(int(high) + 1)})


def test_the_documented_tenancy_file_can_be_read(tmp_path: Path) -> None:
    (block,) = (text for text in _blocks(ROOT / "docs/settings.md", "yaml") if "bounds:" in text)
    file = tmp_path / "tenancy.yaml"
    file.write_text(block)
    assert tenancy.read(file).namespaces["students"].bounds.max_nodes == 2


def test_every_file_that_the_architecture_names_is_there() -> None:
    named = re.findall(r"`([\w./]*(?:/|\.py))`", (ROOT / "docs/architecture.md").read_text())
    roots = (ROOT, ROOT / "operator/ddpjob_operator", ROOT / "trainer_image/ddp_trainer")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []
    assert len(named) > 40


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_every_value_that_helm_is_given_in_a_document_is_one_of_the_chart(page: Path) -> None:
    for key in re.findall(r"--set(?:-json)? '?([\w.]+)=", page.read_text()):
        assert _is_value_of_the_chart(key), key


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_no_document_has_helm_take_a_number_for_a_text(page: Path) -> None:
    """To `--set` all but whole numbers are texts, which the schema of the chart refuses. `--set-json` knows them."""
    given = [pair for pairs in re.findall(r"--set (\S+=\S+)", page.read_text()) for pair in pairs.split(",")]
    assert [pair for pair in given if re.search(r"=-?\d*\.\d+`?$", pair)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=_name)
def test_no_document_has_helm_put_the_values_of_an_older_chart_in_place_of_a_newer_ones(page: Path) -> None:
    """By `--reuse-values` the defaults are those of the release before: the schema misses every value that is new."""
    assert [text for _, text in _FENCE.findall(page.read_text()) if " --reuse-values" in text] == []


def _is_value_of_the_chart(key: str) -> bool:
    found = yaml.safe_load((ROOT / "charts/ddpjob-operator/values.yaml").read_text())
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


_OF_CHART = re.compile(r"\bchart value ([\w.]*\w)|\bset ([\w.]*\w)(?:: \w+)? in (?:the|its) chart\b")
"""How messages name a value of the chart."""


def test_every_value_of_the_chart_that_a_message_names_is_one() -> None:
    messages = [
        (path.name, text)
        for path in sorted((ROOT / "operator").rglob("*.py"))
        if re.search(r"\bchart\b", module := path.read_text())
        for text in _messages(ast.parse(module))
        if re.search(r"\bchart\b", text)
    ]
    assert len(messages) >= 5
    for file, text in messages:
        named = [value or set_to for value, set_to in _OF_CHART.findall(text)]
        assert named, f"{file}: write `chart value NAME` or `set NAME in the chart`, for this test: {text}"
        assert [name for name in named if not _is_value_of_the_chart(name)] == [], f"{file}: {text}"


def _messages(module: ast.Module) -> list[str]:
    """The strings of a module that are no docstrings."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def _section(page: Path, heading: str) -> str:
    _, _, rest = page.read_text().partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0].strip()


@pytest.mark.parametrize(
    ("heading", "word"),
    [
        ("Contact", "Report a vulnerability"),
        ("Supported versions", "newest minor version"),
        ("What the operator's token is worth", "service account"),
        ("Bounds and their defaults", "tenancy"),
    ],
)
def test_security_says_whom_to_ask_and_what_is_at_stake(heading: str, word: str) -> None:
    assert word in _section(ROOT / "SECURITY.md", heading)


def test_security_names_each_bound_and_the_defaults_that_the_code_and_the_chart_have() -> None:
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", _section(ROOT / "SECURITY.md", "Bounds and their defaults"), re.M)
    said = {name.strip("`"): default.strip("`") for names, default in rows for name in names.split(", ")}
    bounds = Bounds()
    values = {
        "podSecurity": bounds.pod_security, "hostNetwork": bounds.host_network, "maxNodes": bounds.max_nodes,
        "maxProcsPerNode": bounds.max_procs_per_node, "resources": bounds.resources,
    } | {name: bounds.allowed.get(name) for name in SETTINGS}  # fmt: skip
    assert values.keys() == {field.alias for field in tenancy.JobBounds.model_fields.values()}
    chart = yaml.safe_load((ROOT / "charts/ddpjob-operator/values.yaml").read_text())
    assert chart["tenancy"] == {}
    real = {
        f"bounds.{name}": json.dumps(value) if value or value is False else "none" for name, value in values.items()
    }
    for path in said.keys() - real.keys():
        value = chart
        for part in path.split("."):
            value = value[part]
        real[path] = json.dumps(value)
    assert said == {name: value.strip('"') for name, value in real.items()}


def test_the_memory_limit_of_the_chart_is_twice_the_peak_that_was_measured() -> None:
    (peak,) = re.findall(r"Memory: at most (\d+) MiB", (ROOT / "docs/performance.md").read_text())
    values = (ROOT / "charts/ddpjob-operator/values.yaml").read_text()
    limit = yaml.safe_load(values)["resources"]["limits"]["memory"]
    assert 2 * int(peak) <= int(limit.removesuffix("Mi")) <= 3 * int(peak)
    assert f"{peak} MiB" in values
