"""A test without the mark that starts a process fails; what other tests started may end after it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
CONFTEST = """
from pathlib import Path
from subprocess import run

import pytest
from tests.support.starting import NoProcess, starts_processes

def pytest_configure(config):
    config.pluginmanager.register(NoProcess(Path(__file__).parent / "unit"))

@pytest.fixture(scope="session")
def cluster():
    run(["true"], check=True)
    yield
    run(["true"], check=True)

@pytest.fixture
@starts_processes
def started():
    run(["true"], check=True)

@pytest.fixture
def unmarked():
    run(["true"], check=True)

@pytest.fixture
def ends_with_one():
    yield
    run(["true"], check=True)
"""
CLUSTER = """
def test_pods(cluster): pass
"""
UNIT = """
from subprocess import run

import pytest

def test_starts_one(): run(["true"], check=True)

def test_has_a_fixture_that_starts_one(unmarked): pass

def test_has_a_fixture_that_ends_with_one(ends_with_one): pass

def test_has_a_fixture_that_marks_it(started): run(["true"], check=True)

@pytest.mark.processes
def test_is_marked(): run(["true"], check=True)

def test_starts_none(): pass
"""


@pytest.mark.processes
def test_a_process_of_a_test_without_the_mark_fails_it_and_those_of_its_session_do_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for folder, tests in (("cluster", CLUSTER), ("unit", UNIT)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    processes\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    results = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", ended.stdout, re.MULTILINE)
    assert sorted((test, result) for result, test in results) == [
        ("test_has_a_fixture_that_ends_with_one", "ERROR"),
        ("test_has_a_fixture_that_ends_with_one", "PASSED"),
        ("test_has_a_fixture_that_marks_it", "PASSED"),
        ("test_has_a_fixture_that_starts_one", "ERROR"),
        ("test_is_marked", "PASSED"),
        ("test_pods", "PASSED"),
        ("test_starts_none", "PASSED"),
        ("test_starts_one", "FAILED"),
    ], ended.stdout
