"""A tier that must run and cannot is a failure; one that need not is a skip. Both say what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cluster.turns import ALONE, BESIDE, FIRST, LAST
from tests.support.tiers import TIERS, cannot_run, program, required_tiers

ROOT = Path(__file__).parents[2]
ABSENT = "no-program-has-this-name"


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_that_must_run_fails_where_it_cannot(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    monkeypatch.setenv("DDPJOB_REQUIRE", f"api,{tier}")
    with pytest.raises(pytest.fail.Exception, match=rf"DDPJOB_REQUIRE names the {tier} tier, .*: nodes need root"):
        cannot_run(tier, "nodes need root")


@pytest.mark.parametrize("required", ["", "api"])
def test_a_tier_that_need_not_run_skips_where_it_cannot(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setenv("DDPJOB_REQUIRE", required)
    with pytest.raises(pytest.skip.Exception, match="nodes need root"):
        cannot_run("cluster", "nodes need root")


@pytest.mark.parametrize(
    ("required", "outcome"), [("shells", pytest.fail.Exception), ("browser", pytest.skip.Exception)]
)
def test_a_program_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("DDPJOB_REQUIRE", required)
    with pytest.raises(outcome, match=rf"{ABSENT} is not installed"):
        program("shells", ABSENT)


def test_a_program_that_is_there_is_found_by_any_of_its_names() -> None:
    assert Path(program("shells", ABSENT, "sh")).name == "sh"


def test_a_tier_that_does_not_exist_cannot_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_REQUIRE", "api, clusters")
    with pytest.raises(pytest.UsageError, match="names clusters; the tiers are api, browser, cluster, images"):
        required_tiers()


def test_continuous_integration_requires_every_tier() -> None:
    (required,) = re.findall(r"^export DDPJOB_REQUIRE=(\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(required.split(",")) == set(TIERS)


@pytest.mark.parametrize("target", ["test", "test-unit", "test-trainer", "test-local", "test-api", "test-packaging"])
def test_a_target_installs_what_its_tests_run(target: str) -> None:
    (needs,) = re.findall(rf"^{target}: (.*?)  ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "tools" in needs.split()


def test_no_test_skips_by_itself_where_a_program_is_missing() -> None:
    """`program` decides that, or DDPJOB_REQUIRE could not make it a failure."""
    skips = re.compile(r"skip(?:if)?\((?:[^()]|\([^()]*\))*(?:shutil\.which|is not installed)")
    files = (ROOT / "tests").rglob("*.py")
    assert [str(file) for file in files if skips.search(file.read_text()) and file != Path(__file__)] == []


def test_the_files_that_two_workers_run_at_the_same_time_are_there_and_fit() -> None:
    folder = ROOT / "tests" / "cluster"
    assert [name for name in (FIRST, LAST, *ALONE, *BESIDE) if not (folder / name).is_file()] == []
    needs_another = re.compile(r"\bUnbroken\b|\bnode_lost\b|\bkill_operator\b|drain-node")
    assert [name for name in sorted(BESIDE) if needs_another.search((folder / name).read_text())] == []
    takes_away = re.compile(r"\bnode_lost\b|\bkill_operator\b|drain-node")
    assert {path.name for path in folder.glob("test_*.py") if takes_away.search(path.read_text())} == ALONE
