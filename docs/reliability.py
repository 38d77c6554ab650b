"""Writes docs/reliability.md: each fault, what the product does, and the tests that inject it.

`python docs/reliability.py` writes it; with `--check` it ends with 1 if the page is out of date or a fault has no test.
The tests are those with the marker `fault`. They are read and not imported, so that this needs neither torch nor
pytest.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddpjob_operator.api import generated

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FIGURES = ROOT / "docs" / "reliability.json"
"""What `make chaos` has measured."""


class Fault(NamedTuple):
    """One fault, and what must happen."""

    what: str
    behaviour: str


FAULTS = {
    1: Fault("The operator is killed before or after any API call", "The next one ends in the same state"),
    2: Fault(
        "A write takes effect and its answer is lost",
        "An object of ours that exists already counts as created, one that is gone as deleted",
    ),
    3: Fault("A write is answered 409", "The object is read again and the decision is made again"),
    4: Fault("A watch expires (410)", "Everything in that namespace is listed at once; what the list lacks is deleted"),
    5: Fault(
        "429 with Retry-After in seconds or as a date",
        "The call waits as long as the server asks; training does not notice",
    ),
    6: Fault("Lists fail with 503 for two minutes", "Retries with growing waits, readyz says why, no pod is touched"),
    7: Fault(
        "A call hangs, is reset, or its answer or event breaks off",
        "It is given up after 15 s, a write after 35 s, and made again; a watch begins anew where it was",
    ),
    8: Fault("A watch falls silent", "It begins anew after 70 to 105 s without an event or a bookmark"),
    9: Fault("A watch sends an error", "The operator ends with an error and is started anew"),
    10: Fault("A list is old", "A deletion names the pod's uid, so a newer pod of that name stays"),
    11: Fault(
        "Events come twice, in another order, or never", "No call is made twice; what was lost is found by the resync"
    ),
    12: Fault(
        "401 after a rotation of the token, 403 after a change of the role",
        "New credentials are read; the condition Degraded gives the server's words until the right is back",
    ),
    13: Fault(
        "Two operators, and the leader sleeps past its Lease",
        "It writes nothing when it wakes; calls of its that arrive late change nothing",
    ),
    14: Fault("The clock jumps by an hour", "No restart waits longer than its longest backoff"),
    15: Fault("A job is deleted while there is no operator", "Owner references remove all that belonged to it"),
    16: Fault("The namespace is deleted", "The refusal is final: nothing is tried again, and the deletion goes on"),
    17: Fault("The spec is edited while the job runs", "Refused, or used by the next attempt; never by part of a gang"),
    18: Fault("The CRD is upgraded or downgraded under a job", "The job goes on; no restart, none counted twice"),
    19: Fault(
        "Labels or owners of pods are changed",
        "A pod belongs to the job that controls it; one restart at most, and creations wait longer each time",
    ),
    20: Fault("A quota refuses some pods of a gang", "The gang is given back whole, Degraded says why, tried again"),
    21: Fault("Admission denies pods or does not answer", "Degraded gives the words; no failure is counted"),
    22: Fault("A pod is evicted or preempted", "A restart that counts as a disruption and costs no budget"),
    23: Fault("A rank exceeds its memory limit", "OOMKilled is counted, with advice in the status"),
    24: Fault(
        "A node is lost",
        "The next attempt starts after restart.nodeLostSeconds, at once while the gang takes no step or if the node "
        "confirms no deletion; the old one is fenced; removal by force only by policy",
    ),
    25: Fault("A pod reports another final phase, or runs again", "The first final phase counts"),
    26: Fault("An image cannot be pulled", "Named in a condition at once, Failed at the deadline"),
    27: Fault("Pods find no node", "Named in a condition; a gang that is not complete in time gives its nodes back"),
    28: Fault("Rank 0 dies", "One restart, the first cause in the status, the same bits in the end"),
    29: Fault("Another rank dies, or several at once", "One restart, the first cause in the status"),
    30: Fault("Bad arguments, an import that fails", "Failed at once with the words of the error; no second attempt"),
    31: Fault("A rank hangs in a collective", "Stacks of all ranks are saved, the rank is named, the gang restarts"),
    32: Fault("A worker of an older attempt comes late", "The rendezvous of the newer attempt refuses it"),
    33: Fault("The volume is missing or read-only", "A condition that names it; no crash loop"),
    34: Fault("The disk is full during a save", "The old snapshot stays, the unfinished one goes, training goes on"),
    35: Fault("The disk is slow or hangs", "A save times out and is counted; training goes on"),
    36: Fault("Killed at any write, fsync or rename of a save", "The newest snapshot that was promised loads"),
    37: Fault("A snapshot is torn, empty or has flipped bits", "Refused by its checksum and set aside; the one before"),
    38: Fault("Another format, or another number of ranks", "Refused by name, or loaded; no sample twice"),
    39: Fault("Two attempts write to one volume", "The older one stops and changes no file of the newer"),
    40: Fault("Killed at some step", "The losses and weights are those of a run that was not"),
    41: Fault("Counts or texts without bound in a spec", "Refused by the schema"),
    42: Fault("Long, dotted or similar names", "Shortened with a hash; no two objects share a name"),
    43: Fault("Labels or owners in the pod template", "The operator's own win"),
    44: Fault("RANK, MASTER_ADDR or LD_PRELOAD in the environment", "Refused with the name of the variable"),
    45: Fault("A snapshot path with `..` or a symbolic link", "Refused: a job stays in its own directory"),
    46: Fault("`;` or `$(…)` in arguments", "Passed on as written, without a shell and without expansion"),
    47: Fault("A malicious pickle as a snapshot", "Never executed"),
    48: Fault("A secret in a variable, an argument or an exception", "In no status, event, log, annotation or metric"),
    49: Fault("A thousand jobs come and go", "Series and memory of the operator are where they were"),
}

TEXT = """\
<!-- Generated by docs/reliability.py from the markers of the tests; do not edit. -->
# Reliability

## Faults

Each fault is injected by the tests in the last column, which assert what stands in the one before. `make lint` fails
if a fault has no test. A test is named by its file below `tests` and its function.

{table}

`tests/api_server/test_faults.py` goes through every API call of a job with a restart: the operator is killed before
and after it, its answer is lost, it is answered 409, 500, 429, and the next operator begins with lists in which the
last change of jobs or pods is missing. Every version of every object is recorded and checked. That these checks notice
what they are for is shown in `tests/api_server/test_seeded_bugs.py` with operators that have a bug each.

## Random faults on two nodes

{chaos}
"""


def tests_of() -> dict[int, list[str]]:
    """By number, the tests that inject a fault.

    Raises ValueError for a marked test that is skipped or expected to fail.
    """
    found: dict[int, list[str]] = {number: [] for number in FAULTS}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text()
        if "mark.fault(" not in source:
            continue
        for test, numbers, marks in _marked(ast.parse(source)):
            if {"skip", "skipif", "xfail"} & marks:
                raise ValueError(f"{file.name}::{test} has the marker fault, and may be skipped")
            for number in numbers:
                found[number].append(f"`{file.relative_to(ROOT / 'tests')}` {test.removeprefix('test_')}")
    return found


def _marked(module: ast.Module) -> Iterator[tuple[str, list[int], set[str]]]:
    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = {ast.unparse(mark.func if isinstance(mark, ast.Call) else mark): mark for mark in node.decorator_list}
        mark = marks.get("pytest.mark.fault")
        if isinstance(mark, ast.Call) and node.name.startswith("test_"):
            numbers = [int(ast.literal_eval(argument)) for argument in mark.args]
            yield node.name, numbers, {name.removeprefix("pytest.mark.") for name in marks}


def rendered(tests: dict[int, list[str]], figures: list[dict[str, Any]]) -> str:
    """The page as Markdown."""
    rows = ["| # | Fault | What happens | Tests |", "|---|---|---|---|"]
    for number, fault in FAULTS.items():
        rows.append(f"| {number} | {fault.what} | {fault.behaviour} | {'<br>'.join(tests[number])} |")
    return TEXT.format(table="\n".join(rows), chaos=_chaos(figures))


def _chaos(figures: list[dict[str, Any]]) -> str:
    intro = """\
`make chaos SEED=1 MINUTES=10` starts three jobs of two tenants on a cluster of two nodes, one of them elastic. Ranks,
pods, nodes, the operator, the API server and DNS die at moments that follow from the seed, some of them while a job is
Restarting or Starting. At the end all jobs have succeeded, the weights and losses equal those of unbroken runs bit for
bit (from the step on which the elastic job took with one node, within 1e-6, in double precision), the counters are
those that the faults explain, no pair of attempt and rank had two pods that began in all that etcd has on record, and
nothing is left over. Lost steps are compared with those that the ranks made again: the step that was under way when an
attempt ended counts as one."""
    if not figures:
        return intro
    rows = ["| Kubernetes | Seed | Minutes | Faults | Restarts | Disruptions | Steps lost | Violations |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    keys = ("kubernetes", "seed", "minutes", "faults", "restarts", "disruptions", "stepsLost", "violations")
    rows += ["| " + " | ".join(str(run[key]) for key in keys) + " |" for run in figures]
    return intro + "\n\n" + "\n".join(rows)


def main(argv: list[str]) -> int:
    """Write the page; with --check, only report whether it is up to date."""
    tests = tests_of()
    if missing := [str(number) for number, names in tests.items() if not names]:
        print(f"no test has the marker of fault {', '.join(missing)} (docs/reliability.py)", file=sys.stderr)
        return 1
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    return generated.write({PAGE: rendered(tests, figures)}, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
