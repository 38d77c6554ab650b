"""The settings: where they come from, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.trainer.documented import message
from torch.torch_version import TorchVersion

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.world import World
from ddp_trainer.train.__main__ import exit_code
from ddp_trainer.train.command_line import parse
from ddp_trainer.train.config import Interval, TrainConfig, check_elastic, check_scope, check_world
from ddp_trainer.train.live import check_live

REFUSED = [
    ("--epochs x", "--epochs: 'x' is no whole number"),
    ("--lr fast", "--lr: 'fast' is no number"),
    ("--learning-rate 1", "unrecognized arguments: --learning-rate 1"),
    ("--ep 3", "unrecognized arguments: --ep 3"),
    ("--optimizer lion", "invalid choice: 'lion' (choose from"),
    ("--epochs 0", "--epochs 0 is out of range: it must be at least 1"),
    ("--lr 0", "--lr 0.0 is out of range: it must be more than 0"),
    ("--lr nan", "--lr nan is out of range"),
    ("--lr inf", "--lr inf is out of range: it must be at most 3.4e+38"),
    ("--timeout-seconds inf", "--timeout-seconds inf is out of range: it must be at most 1e+06"),
    ("--timeout-seconds 1e30", "--timeout-seconds 1e+30 is out of range"),
    ("--precision fp16 --scaler-init-scale 1e300", "--scaler-init-scale 1e+300 is out of range"),
    ("--clip-norm -1", "--clip-norm -1.0 is out of range: it must be more than 0"),
    ("--micro-batch 65", "--micro-batch 65 is more than --global-batch 64"),
    ("--momentum 0.9", "--momentum 0.9 has no meaning for --optimizer adamw: leave it out, or choose sgd"),
    ("--decay-factor 0.5", "--decay-factor 0.5 belongs to --scheduler step, not none"),
    ("--scheduler step", "--scheduler step needs --decay-every"),
    ("--decay-every 5", "--decay-every 5 belongs to --scheduler step, not none"),
    ("--max-steps 5 --warmup-steps 5", "--warmup-steps 5 leaves nothing of --max-steps 5"),
    ("--strategy single --static-graph", "--static-graph belongs to --strategy ddp, not single"),
    ("--strategy fsdp --precision fp16", "which --strategy fsdp never has: choose bf16"),
    ("--strategy hsdp --precision fp16", "which --strategy hsdp never has: choose bf16"),
    ("--strategy pipeline --precision fp16", "which no stage of --strategy pipeline does: choose bf16"),
    ("--strategy pipeline --compile", "--compile compiles a whole model"),
    ("--strategy data_parallel --compile", "copies in every step: choose --strategy ddp"),
    ("--pipeline-schedule gpipe", "--pipeline-schedule belongs to --strategy pipeline, not ddp"),
    ("--static-graph --find-unused-parameters", "contradict each other"),
    ("--prefetch 4", "--prefetch 4 needs --workers"),
    ("--validate-every often", "--validate-every 'often' is no interval: write such as 100steps"),
    ("--validate-every 0steps", "is no interval"),
    ("--profile 15:10", "--profile '15:10' is no window of steps: write the first and the last, such as 10:15"),
    ("--task-options dropout", "--task-options 'dropout' must be KEY=VALUE"),
    ("--config /does/not/exist.yaml", "--config /does/not/exist.yaml cannot be read: No such file"),
]

REFUSED_FILES = [
    ("epoch: 3", "epoch is no setting: did you mean epochs?"),
    ("bananas: 3", "bananas is no setting: `--help` lists all settings."),
    ("epochs: three", "epochs 'three' must be a whole number"),
    ("epochs: 3.5", "epochs 3.5 must be a whole number"),
    ("epochs: true", "epochs True must be a whole number"),
    ("lr: quick", "lr 'quick' must be a number"),
    ("compile: 1", "compile 1 must be true or false"),
    ("optimizer: lion", "optimizer 'lion' is unknown: choose one of sgd, adam, adamw"),
    ("task: [digits]", "task ['digits'] must be text, in quotes"),
    ("profile: 10:15", "profile 615 as YAML reads it must be text, in quotes"),
    (f"lr: {'9' * 400}", "must be a number"),
    ("wandb: on", "wandb True is unknown: choose one of off, offline"),
    ("task_options: 3", "task_options 3 must be a mapping"),
    ("- epochs", "must be a mapping of settings, such as `epochs: 20`, not a list"),
    ("epochs: [", "is no YAML"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_a_bad_command_line_is_refused_naming_field_value_and_fix(line: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse(line.split())
    assert message in str(refusal.value)


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES)
def test_a_bad_file_is_refused_naming_file_field_and_fix(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        parse(["--config", str(file)])
    assert str(file) in str(refusal.value)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "ranks", "device", "message"),
    [
        (
            "--strategy single",
            2,
            "cpu",
            "--strategy single trains on one rank, but 2 were started: choose --strategy ddp",
        ),
        ("--strategy data_parallel", 2, "cuda", "trains on one rank, but 2 were started"),
        ("--strategy data_parallel", 1, "cpu", "on the CPU torch.nn.DataParallel does nothing: choose --strategy ddp"),
        ("--strategy pipeline --micro-batch 40", 3, "cpu", "fewer micro-batches than the 3 stages"),
        ("--global-batch 64", 3, "cpu", "--global-batch 64 cannot be divided among 3 ranks"),
        ("--global-batch 64", 3, "cpu", "choose 63 or 66, or a number of ranks that divides 64"),
        ("--global-batch 2", 4, "cpu", "choose 4, or a number"),
        ("--sync-batchnorm", 2, "cpu", "--sync-batchnorm needs CUDA"),
    ],
)
def test_what_cannot_work_with_these_ranks_is_refused_before_training(
    line: str, ranks: int, device: str, message: str
) -> None:
    with pytest.raises(UserError) as refusal:
        check_world(parse(line.split()), world_size=ranks, device=device)
    assert message in str(refusal.value)


def test_a_pipeline_that_only_the_file_of_settings_names_is_refused_in_an_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("strategy: pipeline\n")
    monkeypatch.setenv("DDPJOB_ELASTIC_MIN_NODES", "1")
    assert exit_code(["--config", str(tmp_path / "run.yaml")]) == 64
    assert message("Pipeline").search(capsys.readouterr().err)
    check_elastic(parse(["--strategy", "fsdp"]), 1)
    check_elastic(parse(["--strategy", "pipeline"]), None)


@pytest.mark.parametrize(
    ("strategy", "is_live", "words"),
    [("hsdp", False, "needs restart.scope Live"), ("hsdp", True, None), ("ddp", False, None)],
)
def test_a_strategy_that_recovers_live_needs_that_scope(strategy: str, is_live: bool, words: str | None) -> None:
    config = parse(["--strategy", strategy])
    if words is None:
        check_scope(config, is_live=is_live)
        return
    with pytest.raises(UserError, match=words):
        check_scope(config, is_live=is_live)


def test_shards_that_span_pods_are_refused_with_live_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(UserError, match=r"--strategy fsdp .* restart.scope Live .* use --strategy hsdp"):
        check_live(parse(["--strategy", "fsdp"]), World())
    check_live(parse(["--strategy", "hsdp"]), World())


def test_shards_of_a_pod_need_a_torch_that_has_groups_in_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0+cu128"))
    with pytest.raises(
        UserError, match=r"needs PyTorch 2\.13 or newer, and this is 2\.10\.0\+cu128: use a newer image"
    ):
        check_live(parse(["--strategy", "hsdp"]), World())
    check_live(parse(["--strategy", "ddp"]), World())


@pytest.mark.parametrize(
    ("device", "there", "lacking"),
    [("cpu", ["g++"], None), ("cpu", ["gcc"], r"g\+\+"), ("cuda", ["clang"], None), ("cuda", ["g++"], "gcc or clang")],
)
def test_compiling_without_a_compiler_is_refused_before_training(
    device: str, there: list[str], lacking: str | None, monkeypatch
) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)

    expected = nullcontext() if lacking is None else pytest.raises(UserError, match=f"there is no {lacking} here")
    with expected as refusal:
        find = {name: name for name in there}.get
        check_world(parse(["--compile"]), world_size=1, device=device, devices=1, find=find)
    assert refusal is None or message("Compile").fullmatch(str(refusal.value))


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 3\nglobal-batch: 32\ntask_options: {dropout: 0.5, width: 8}\nclip_norm: null\n")
    config = parse(["--config", str(file), "--epochs", "4", "--task-options", "width=16"])
    assert config == TrainConfig(epochs=4, global_batch=32, task_options={"dropout": 0.5, "width": 16})


def test_a_file_may_write_a_learning_rate_as_people_do(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\n")
    assert parse(["--config", str(file)]).lr == 0.001


def test_a_file_may_switch_off_what_is_off_by_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("wandb: off\n")
    assert parse(["--config", str(file)]).wandb == "off"


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 3", encoding="utf-16")
    with pytest.raises(UserError, match=r"run\.yaml is no text in UTF-8: save it as that"):
        parse(["--config", str(file)])


@pytest.mark.processes
def test_every_field_is_a_flag_with_a_description() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ddp_trainer.train", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": "trainer_image"},
    ).stdout
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert field.metadata["help"].split()[0] in shown


@pytest.mark.processes
def test_a_bad_flag_is_told_before_torch_is_imported() -> None:
    code = (
        "import sys; from ddp_trainer import train\n"
        "try: train.main(['--epochs', '0'])\n"
        "except Exception: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "trainer_image"}
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("interval", "step", "epochs", "epoch_end", "due"),
    [
        ("2epochs", 10, 2, True, True),
        ("2epochs", 10, 1, True, False),
        ("2epochs", 10, 2, False, False),
        ("5steps", 10, 1, False, True),
        ("5steps", 11, 1, True, False),
        ("never", 10, 1, True, False),
    ],
)
def test_an_interval_is_due_at_its_multiples(interval: str, step: int, epochs: int, epoch_end: bool, due: bool) -> None:
    parsed = Interval.parse("validate_every", interval)
    assert parsed.due(step=step, finished_epochs=epochs, epoch_end=epoch_end) is due
