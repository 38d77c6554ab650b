"""Validation rules for `--strategy` in the args of the built-in loop, beside other fields of `spec`."""

from __future__ import annotations

from itertools import pairwise

from ddpjob_operator.api.spec import BUILT_IN_MODULE, DDPJobSpec

STRATEGIES = ("single", "ddp", "manual_allreduce", "manual_rs_ag", "data_parallel", "fsdp", "hsdp", "pipeline")
"""Those of the built-in loop."""


def elastic_pipeline(spec: DDPJobSpec) -> str | None:
    if spec.elastic is None or not _has_strategy(spec, "pipeline"):
        return None
    return (
        "spec.elastic: --strategy pipeline has a stage on each rank and resumes with the same number of ranks only; "
        "remove elastic, or use --strategy fsdp"
    )


def live_fsdp(spec: DDPJobSpec) -> str | None:
    if spec.restart.scope != "Live" or not _has_strategy(spec, "fsdp"):
        return None
    return (
        "spec.restart.scope: Live does not work with --strategy fsdp, whose shards span the pods; use --strategy hsdp, "
        "or scope InPlace"
    )


def hsdp_without_live(spec: DDPJobSpec) -> str | None:
    if spec.restart.scope == "Live" or not _has_strategy(spec, "hsdp"):
        return None
    return (
        f"spec.restart.scope: {spec.restart.scope} does not work with --strategy hsdp, which recovers live; set it to "
        "Live, or use --strategy fsdp"
    )


def _has_strategy(spec: DDPJobSpec, name: str) -> bool:
    """Whether the args of the built-in loop say so; a file of --config is seen by the trainer only."""
    built_in = spec.entrypoint.script is None and spec.entrypoint.module in (None, BUILT_IN_MODULE)
    return built_in and (f"--strategy={name}" in spec.args or ("--strategy", name) in pairwise(spec.args))


def has_strategy_cel(name: str) -> str:
    """The same in CEL, which has no way to ask for the item after another one: the operator alone checks args with the
    name of a second strategy, which may be the value of another flag.
    """
    others = ", ".join(f"'{other}'" for other in STRATEGIES if other != name)
    return (
        "!has(self.entrypoint.script) && "
        f"(!has(self.entrypoint.module) || self.entrypoint.module == '{BUILT_IN_MODULE}') && "
        f"(self.args.exists(item, item == '--strategy={name}') || "
        f"('--strategy' in self.args && '{name}' in self.args && !self.args.exists(item, item in [{others}])))"
    )
