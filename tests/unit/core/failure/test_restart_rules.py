"""What a failure leads to: the job's own rules in order, then the defaults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_job

from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.restart_rules import DISRUPTIONS, RuleAction, rule_on

SEGFAULT = Failure("WorkerKilled", "rank 1 was killed by SIGSEGV", Retry.YES, exit_code=1, signal="SIGSEGV")
ECC = Failure("WorkerException", "rank 0 raised\nCUDA error: uncorrectable ECC error", Retry.YES, exit_code=1)
ARGUMENT = Failure("UserError", "--lr: -1 is negative", Retry.NEVER, exit_code=64)
FENCED = Failure("Fenced", "a newer attempt owns the volume", Retry.NEVER, exit_code=77)
EVICTED = Failure("Evicted", "The node was low on resource: memory.", Retry.YES)

DOCUMENT = (Path(__file__).parents[4] / "docs/conditions.md").read_text()
DOCUMENTED_DISRUPTIONS = re.findall(r"^\| `(\w+)` \| [^|]* A disruption\. \|", DOCUMENT, re.MULTILINE)


def rules(*given: dict[str, Any]) -> Any:
    return make_job(restart={"rules": list(given)}).spec.restart


def rule(action: str = "Fail", **conditions: Any) -> dict[str, Any]:
    return {"action": action} | conditions


@pytest.mark.parametrize(
    ("conditions", "failure", "matches"),
    [
        pytest.param({"exitCodes": [64]}, ARGUMENT, True, id="an exit code"),
        pytest.param({"exitCodes": [1, 64]}, ARGUMENT, True, id="one of several exit codes"),
        pytest.param({"exitCodes": [2]}, ARGUMENT, False, id="another exit code"),
        pytest.param({"exitCodes": [1]}, EVICTED, False, id="an exit code of a pod that has none"),
        pytest.param({"reasons": ["Evicted"]}, EVICTED, True, id="a reason"),
        pytest.param({"reasons": ["OOMKilled", "NodeLost"]}, EVICTED, False, id="other reasons"),
        pytest.param({"signals": ["SIGBUS", "SIGSEGV"]}, SEGFAULT, True, id="a signal"),
        pytest.param({"signals": ["SIGKILL"]}, SEGFAULT, False, id="another signal"),
        pytest.param({"signals": ["SIGKILL"]}, ECC, False, id="a signal of a rank that got none"),
        pytest.param({"messagePattern": "uncorrectable ECC|Xid"}, ECC, True, id="a word on a later line"),
        pytest.param({"messagePattern": "^CUDA"}, ECC, False, id="an anchor means the beginning of the message"),
        pytest.param({"messagePattern": "(?m)^CUDA"}, ECC, True, id="unless it asks for lines"),
        pytest.param({"messagePattern": "ecc"}, ECC, False, id="case counts"),
        pytest.param({"exitCodes": [1], "messagePattern": "ECC"}, ECC, True, id="two conditions that hold"),
        pytest.param({"exitCodes": [1], "messagePattern": "ECC"}, SEGFAULT, False, id="two, one of which holds"),
        pytest.param({"signals": ["SIGSEGV"], "reasons": ["Stalled"]}, SEGFAULT, False, id="the other one of two"),
        pytest.param({}, ECC, True, id="no condition is met by everything"),
    ],
)
def test_a_rule_matches_if_all_that_it_says_holds(conditions: Any, failure: Failure, matches: bool) -> None:
    assert rule_on(rules(rule("ExcludeNode", **conditions)), failure).explicit is matches


@pytest.mark.parametrize(
    ("failure", "action"),
    [
        pytest.param(ARGUMENT, RuleAction.FAIL, id="exit code 64 fails"),
        pytest.param(FENCED, RuleAction.FAIL, id="exit code 77 fails"),
        pytest.param(SEGFAULT, RuleAction.RESTART, id="a signal counts"),
        pytest.param(ECC, RuleAction.RESTART, id="an exception counts"),
        pytest.param(Failure("PodDeleted", "", Retry.YES), RuleAction.RESTART, id="a deletion counts"),
        pytest.param(Failure("OOMKilled", "", Retry.YES), RuleAction.RESTART, id="a kill for memory counts"),
        pytest.param(Failure("OutOfMemory", "", Retry.YES), RuleAction.RESTART, id="not to be taken for OutOfmemory"),
        pytest.param(Failure("NobodyKnows", "", Retry.YES), RuleAction.RESTART, id="what nobody knows counts"),
        *(
            pytest.param(Failure(r, "", Retry.YES), RuleAction.RESTART_AND_IGNORE_MAX_RESTARTS, id=f"{r} is free")
            for r in DOCUMENTED_DISRUPTIONS
        ),
    ],
)
def test_the_defaults(failure: Failure, action: RuleAction) -> None:
    ruling = rule_on(rules(), failure)
    assert (ruling.action, ruling.explicit) == (action, False)


def test_each_disruption_is_documented_as_one() -> None:
    assert sorted(DISRUPTIONS) == sorted(DOCUMENTED_DISRUPTIONS)


def test_the_first_rule_that_matches_decides() -> None:
    policy = rules(
        rule("Restart", exitCodes=[3]),
        rule("RestartAndIgnoreMaxRestarts", reasons=["WorkerException"]),
        rule("Fail", messagePattern="ECC"),
    )
    assert rule_on(policy, ECC).action is RuleAction.RESTART_AND_IGNORE_MAX_RESTARTS


@pytest.mark.parametrize(
    ("failure", "action"),
    [(ARGUMENT, "Restart"), (FENCED, "Restart"), (EVICTED, "Fail"), (SEGFAULT, "RestartAndIgnoreMaxRestarts")],
    ids=["64 can be retried", "77 can be retried", "an eviction can fail the job", "a crash can be free"],
)
def test_rules_come_before_the_defaults(failure: Failure, action: str) -> None:
    assert rule_on(rules(rule(action)), failure).action == action


def test_a_rule_knows_a_reason_by_the_name_that_the_pod_gave_and_by_the_one_in_the_status() -> None:
    for reason in ("WorkerException", "GPUFault"):
        assert rule_on(rules(rule("ExcludeNode", reasons=[reason])), ECC, "GPUFault").explicit


def test_which_rule_decided_and_by_what_is_said() -> None:
    policy = rules(rule("Fail", exitCodes=[3]), rule("ExcludeNode", exitCodes=[1], messagePattern="ECC"))
    assert rule_on(policy, ECC).why == "restart.rules[1] (exit code 1, message matches 'ECC') says ExcludeNode"
    assert rule_on(rules(rule("Fail")), ECC).why == "restart.rules[0] (any failure) says Fail"
    assert rule_on(rules(), EVICTED).why == "Evicted is a disruption"
    assert rule_on(rules(), FENCED).why == "another DDPJob of this name owns the checkpoint directory"
    assert rule_on(rules(), ARGUMENT).why == "a retry would fail in the same way"
    known_as = rules(rule("Fail", reasons=["CUDAError", "GPUFault"]))
    assert (
        rule_on(known_as, ECC, "CUDAError", "GPUFault").why == "restart.rules[0] (reason CUDAError, GPUFault) says Fail"
    )


def test_a_message_that_is_no_valid_text_can_be_searched() -> None:
    assert rule_on(rules(rule(messagePattern="x$")), Failure("A", "\ud800x", Retry.YES)).explicit


def test_a_pattern_that_backtracks_elsewhere_takes_linear_time() -> None:
    policy = rules(rule(messagePattern="(a+)+$"))
    assert not rule_on(policy, Failure("A", "a" * 4000 + "b", Retry.YES)).explicit


@pytest.mark.parametrize("reason", ["Disrupted", "Drained", "NodeTainted", "StorageLimitExceeded"])
def test_a_rule_on_evictions_still_matches_disruptions_of_another_name(reason: str) -> None:
    policy = rules({"action": "Fail", "reasons": ["Evicted"]})
    assert rule_on(policy, replace(EVICTED, reason=reason)).action is RuleAction.FAIL


def test_a_pod_that_fills_its_disk_counts_against_the_budget() -> None:
    assert rule_on(rules(), replace(EVICTED, reason="StorageLimitExceeded")).action is RuleAction.RESTART


@pytest.mark.parametrize("reason", ["OutOfcpu", "OutOfResource", "NodePorts", "VolumeAttachmentLimitExceeded"])
def test_a_node_that_is_full_costs_no_restart(reason: str) -> None:
    assert rule_on(rules(), replace(EVICTED, reason=reason)).action is RuleAction.RESTART_AND_IGNORE_MAX_RESTARTS
