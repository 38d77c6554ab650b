"""Validation rules between fields of `spec`, each in CEL (API servers from 1.25) and in Python (for older servers).

`BETWEEN_FIELDS` apply to every spec. Immutable fields are in `immutable.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import re2

from ddpjob_operator.api.initializer_rules import (
    long_script,
    one_source,
    outside_the_volume,
    repeated_initializer,
    replaced_result,
    source_without_claim,
)
from ddpjob_operator.api.pod import EnvVar
from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.strategy_rules import elastic_pipeline, has_strategy_cel, hsdp_without_live, live_fsdp
from ddpjob_operator.api.template_rules import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    accelerators_without_ranks,
    deadline_of_pods,
    is_reserved,
    malformed_template,
    reserved_template_env,
    restarted_trainer,
    taken_volume_name,
)

LONGEST_WINDOW = 100
"""Maximum number of restart times that the status keeps."""

PATTERN_OPTIONS = re2.Options()
PATTERN_OPTIONS.log_errors = False
# Bounds the compiled program, and with it the time to compile: with RE2's default of 8 MiB a pattern of 20 characters
# takes 0.6 s. 64 KiB hold `\pL+` and 512 characters of alternatives.
PATTERN_OPTIONS.max_mem = 64 << 10


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `path` locates its CEL expression in the schema below `spec`; `problem` returns a message or None.

    Without `cel` only the operator checks the rule. With `at_start`, jobs that have begun may break it: an earlier
    version took them, and they would be left without an operator.
    """

    path: tuple[str, ...]
    cel: str
    message: str
    problem: Callable[[DDPJobSpec], str | None]
    at_start: bool = False


def _both_entrypoints(spec: DDPJobSpec) -> str | None:
    module, script = spec.entrypoint.module, spec.entrypoint.script
    if module is None or script is None:
        return None
    return f"spec.entrypoint: both module {module!r} and script {script!r} are set; keep one of them"


def _script_without_code(spec: DDPJobSpec) -> str | None:
    script = spec.entrypoint.script
    if script is None or script.startswith("/") or spec.code is not None:
        return None
    return (
        f"spec.entrypoint.script: {script!r} is a path in a folder that the job does not have; write an absolute path, "
        "or name the folder in spec.code.path, as `code: {path: .}`, and use `ddpjob submit` or `ddpjob run`"
    )


def _outside_the_code(spec: DDPJobSpec) -> str | None:
    named = {
        "spec.entrypoint.script": spec.entrypoint.script,
        "spec.code.requirements": spec.code.requirements if spec.code else None,
    }
    for field, path in named.items():
        if path is not None and not path.startswith("/") and ".." in path.split("/"):
            return f"{field}: {path!r} must be in the folder of the code; remove `..`"
    return None


def _both_volumes(spec: DDPJobSpec) -> str | None:
    claim = spec.shared.claim_name
    if claim is None:
        return None
    clash = "size" if spec.shared.size else "storageClassName" if spec.shared.storage_class_name else None
    return clash and (
        f"spec.shared: {clash} cannot be combined with claimName {claim!r}, an existing volume; remove one of them"
    )


def _scope_of_a_claim(spec: DDPJobSpec) -> str | None:
    if spec.shared.scope is None or spec.shared.claim_name is not None:
        return None
    return (
        f"spec.shared.scope: {spec.shared.scope!r} is for an existing claim, which several jobs may use; set claimName "
        "too, or remove scope"
    )


def _fetched_into_datasets(spec: DDPJobSpec) -> str | None:
    if spec.shared.scope != "Job":
        return None
    for index, item in enumerate(spec.initializers):
        if item.path.split("/")[0] == "datasets":
            return (
                f"spec.initializers[{index}].path: {item.path!r} is read-only with shared.scope Job; use another "
                "folder, such as data/"
            )
    return None


def _reserved_env(spec: DDPJobSpec) -> str | None:
    for index, variable in enumerate(spec.env):
        if is_reserved(variable.name):
            return f"spec.env[{index}].name: {variable.name} is reserved for the operator; remove it"
    return None


def _two_values(spec: DDPJobSpec) -> str | None:
    def clash(variable: EnvVar) -> bool:
        return variable.value is not None and variable.value_from is not None

    for index, variable in enumerate(spec.env):
        if clash(variable):
            return f"spec.env[{index}]: {variable.name} has both value and valueFrom; keep one of them"
    return None


def _backoff_order(spec: DDPJobSpec) -> str | None:
    backoff = spec.restart.backoff
    if backoff.initial_seconds <= backoff.max_seconds:
        return None
    return (
        f"spec.restart.backoff: initialSeconds {backoff.initial_seconds} is greater than maxSeconds "
        f"{backoff.max_seconds}; raise maxSeconds or lower initialSeconds"
    )


def _elastic_order(spec: DDPJobSpec) -> str | None:
    if spec.elastic is None or spec.elastic.min_nodes <= spec.nodes:
        return None
    least = spec.elastic.min_nodes
    return f"spec.elastic.minNodes: {least} is greater than nodes {spec.nodes}; lower minNodes or raise nodes"


def _idle_spares(spec: DDPJobSpec) -> str | None:
    if spec.spares == 0 or spec.restart.scope in ("InPlace", "Live"):
        return None
    return f"spec.spares: {spec.spares} spares require restart.scope InPlace or Live; set it, or remove spares"


def _stall_order(spec: DDPJobSpec) -> str | None:
    if spec.stall.min_seconds <= spec.stall.max_seconds:
        return None
    least, most = spec.stall.min_seconds, spec.stall.max_seconds
    return f"spec.stall: minSeconds {least} is greater than maxSeconds {most}; raise maxSeconds or lower minSeconds"


def _queue_without_owner(spec: DDPJobSpec) -> str | None:
    scheduling = spec.scheduling
    if scheduling.gang == "Kueue" and scheduling.queue is None:
        return "spec.scheduling.queue: is required with gang Kueue; set it to the name of a LocalQueue"
    if scheduling.queue is not None and scheduling.gang not in ("Kueue", "Volcano"):
        return (
            f"spec.scheduling.queue: {scheduling.queue!r} cannot be used with gang {scheduling.gang}; "
            "set gang to Kueue or Volcano, or remove queue"
        )
    return None


def _one_size_in_a_queue(spec: DDPJobSpec) -> str | None:
    if spec.elastic is None or spec.scheduling.gang != "Kueue":
        return None
    return (
        "spec.scheduling.gang: Kueue admits all pods or none, so an elastic job could not start with fewer nodes; "
        "use another gang scheduler, or remove elastic"
    )


def _window_to_remember(spec: DDPJobSpec) -> str | None:
    restart = spec.restart
    if restart.window_seconds is None or restart.max_restarts <= LONGEST_WINDOW:
        return None
    return (
        f"spec.restart: maxRestarts {restart.max_restarts} is too high with windowSeconds; "
        f"use at most {LONGEST_WINDOW}, or remove windowSeconds"
    )


def _text_of(error: Exception) -> str:
    text = error.args[0] if error.args else ""
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def _pattern_problem(spec: DDPJobSpec) -> str | None:
    for index, rule in enumerate(spec.restart.rules):
        if rule.message_pattern is None:
            continue
        if error := _compile_error(rule.message_pattern):
            path = f"spec.restart.rules[{index}].messagePattern"
            return f"{path}: {rule.message_pattern!r} is not a valid regular expression (RE2 syntax): {error}"
    return None


def is_pattern(text: str) -> bool:
    """Whether `text` can be the pattern of a restart rule."""
    return not _compile_error(text)


@lru_cache(maxsize=4096)
def _compile_error(pattern: str) -> str:
    """Why RE2 refuses a pattern; empty if it does not. Kept, since every look at a job asks again."""
    try:
        re2.compile(pattern, PATTERN_OPTIONS)
    except re2.error as error:
        return _text_of(error)
    return ""


_RESERVED_CEL = " || ".join(
    [
        f"self.name in [{', '.join(repr(name) for name in RESERVED_ENV)}]",
        *(f"self.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES),
    ]
)

BETWEEN_FIELDS: tuple[Rule, ...] = (
    Rule(
        ("entrypoint",),
        "!(has(self.module) && has(self.script))",
        "module and script are both set; keep one of them",
        _both_entrypoints,
    ),
    Rule(
        (),
        "!has(self.entrypoint.script) || self.entrypoint.script.startsWith('/') || has(self.code)",
        "entrypoint.script is a path in a folder that the job does not have; write an absolute path, or send the "
        "folder with `ddpjob submit`",
        _script_without_code,
    ),
    Rule(
        (),
        "!has(self.entrypoint.script) || self.entrypoint.script.startsWith('/') || "
        "!self.entrypoint.script.matches('(^|/)[.][.](/|$)')",
        "entrypoint.script must be in the folder of the code; remove `..`",
        _outside_the_code,
    ),
    Rule(
        ("code",),
        "!has(self.requirements) || !self.requirements.matches('(^|/)[.][.](/|$)')",
        "requirements must be in the folder of the code; remove `..`",
        _outside_the_code,
    ),
    Rule(
        ("shared",),
        "!has(self.claimName) || !(has(self.size) || has(self.storageClassName))",
        "size and storageClassName cannot be combined with claimName, an existing volume; remove one of them",
        _both_volumes,
    ),
    Rule(
        ("shared",),
        "!has(self.scope) || has(self.claimName)",
        "scope is for an existing claim, which several jobs may use; set claimName too, or remove scope",
        _scope_of_a_claim,
    ),
    Rule(
        (),
        "!has(self.shared.scope) || self.shared.scope != 'Job' || "
        "self.initializers.all(item, !item.path.matches('^datasets(/|$)'))",
        "paths of initializers below datasets/ are read-only with shared.scope Job; use another folder, such as data/",
        _fetched_into_datasets,
    ),
    Rule(
        ("env", "[]"),
        f"!({_RESERVED_CEL})",
        "this variable name is reserved for the operator; remove it",
        _reserved_env,
    ),
    Rule(
        ("env", "[]"),
        "!(has(self.value) && has(self.valueFrom))",
        "both value and valueFrom are set; keep one of them",
        _two_values,
    ),
    Rule(
        ("restart", "backoff"),
        "self.initialSeconds <= self.maxSeconds",
        "initialSeconds is greater than maxSeconds; raise maxSeconds or lower initialSeconds",
        _backoff_order,
    ),
    Rule(
        (),
        "!has(self.elastic) || self.elastic.minNodes <= self.nodes",
        "elastic.minNodes is greater than nodes; lower minNodes or raise nodes",
        _elastic_order,
    ),
    Rule(
        (),
        f"!has(self.elastic) || !({has_strategy_cel('pipeline')})",
        "--strategy pipeline resumes with the same number of ranks only; remove elastic, or use --strategy fsdp",
        elastic_pipeline,
        at_start=True,
    ),
    Rule(
        (),
        f"self.restart.scope != 'Live' || !({has_strategy_cel('fsdp')})",
        "restart.scope Live does not work with --strategy fsdp; use --strategy hsdp, or scope InPlace",
        live_fsdp,
    ),
    Rule(
        (),
        f"self.restart.scope == 'Live' || !({has_strategy_cel('hsdp')})",
        "--strategy hsdp needs restart.scope Live; set it, or use --strategy fsdp",
        hsdp_without_live,
    ),
    Rule(
        (),
        "self.spares == 0 || self.restart.scope in ['InPlace', 'Live']",
        "spares require restart.scope InPlace or Live; set it, or remove spares",
        _idle_spares,
    ),
    Rule(
        ("stall",),
        "self.minSeconds <= self.maxSeconds",
        "minSeconds is greater than maxSeconds; raise maxSeconds or lower minSeconds",
        _stall_order,
    ),
    Rule(
        ("initializers", "[]"),
        "has(self.source) != has(self.script)",
        "set either source or script",
        one_source,
    ),
    Rule(
        ("initializers", "[]"),
        "!self.path.matches('(^|/)[.][.](/|$)')",
        "path must be below /mnt/shared; remove `..`",
        outside_the_volume,
    ),
    Rule(
        ("initializers",),
        "self.all(one, self.exists_one(other, other.name == one.name))",
        "names of initializers must be unique; give each its own name",
        repeated_initializer,
    ),
    Rule(("initializers",), "", "", long_script, at_start=True),
    Rule(("initializers",), "", "", source_without_claim, at_start=True),
    Rule(("initializers",), "", "", replaced_result, at_start=True),
    Rule(
        ("scheduling",),
        "has(self.queue) ? self.gang in ['Kueue', 'Volcano'] : self.gang != 'Kueue'",
        "queue is required with gang Kueue, optional with Volcano, and cannot be used otherwise",
        _queue_without_owner,
    ),
    Rule(
        (),
        "!has(self.elastic) || self.scheduling.gang != 'Kueue'",
        "elastic cannot be used with Kueue, which admits all pods or none; change scheduling.gang, or remove elastic",
        _one_size_in_a_queue,
    ),
    Rule(
        ("restart",),
        f"!has(self.windowSeconds) || self.maxRestarts <= {LONGEST_WINDOW}",
        f"maxRestarts is too high with windowSeconds; use at most {LONGEST_WINDOW}, or remove windowSeconds",
        _window_to_remember,
    ),
    Rule(("restart", "rules"), "", "", _pattern_problem),
    Rule(("podTemplate",), "", "", malformed_template),
    Rule(("podTemplate",), "", "", reserved_template_env),
    Rule(("podTemplate",), "", "", taken_volume_name, at_start=True),
    Rule(("podTemplate",), "", "", restarted_trainer, at_start=True),
    Rule(("podTemplate",), "", "", deadline_of_pods, at_start=True),
    Rule(("procsPerNode",), "", "", accelerators_without_ranks, at_start=True),
)


def problems(spec: DDPJobSpec, *, has_begun: bool = False) -> tuple[str, ...]:
    """Messages of all rules that `spec` violates. Each names the field, the value and the fix."""
    rules = (rule for rule in BETWEEN_FIELDS if not (rule.at_start and has_begun))
    return tuple(message for rule in rules if (message := rule.problem(spec)))
