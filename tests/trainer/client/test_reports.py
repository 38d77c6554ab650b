"""What a run reports: phases, logged values, and the digest of its code."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from argparse import Namespace
from collections import UserDict
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.client.one_rank import model_and_optimizer, step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from ddp_trainer.client.own_values import MOST_VALUES, settings, whole
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.contract.heartbeat import read_heartbeats
from ddp_trainer.rank import data_waits
from ddp_trainer.rank.step_reduce import StepReduce
from ddp_trainer.snapshots.trust.manifest import Manifest


def test_a_loss_of_more_than_one_number_is_refused(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    step(model, optimizer)
    with pytest.raises(UserError, match="the loss of a step is one number, and this one has 3: pass its mean"):
        run.step_end(torch.ones(3))


def test_a_loss_and_a_norm_of_a_sharded_model_are_reduced_as_plain_tensors(
    attach: Any, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are copied into a plain tensor, which takes no DTensor: the job ended with an AssertionError."""
    begin, reduced = StepReduce.start, list[Any]()

    def record(self: StepReduce, loss: Tensor, *, gradient_norm: Any = None, **values: Any) -> None:
        reduced.append((type(loss), type(gradient_norm)))
        begin(self, loss, gradient_norm=gradient_norm, **values)

    monkeypatch.setattr(StepReduce, "start", record)
    model = fully_shard(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = attach(model, optimizer)
    run.resume()
    step(model, optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    run.step_end(norm, gradient_norm=norm)
    assert reduced == [(Tensor, Tensor)]
    run.record_loss()
    assert run._log.losses.last_loss == pytest.approx(norm.item())


def test_a_loss_that_is_a_float_is_reported_as_it_is_whatever_the_default_type(attach: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    step(model, optimizer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        run.step_end(70_000.25)
        run.record_loss()
    finally:
        torch.set_default_dtype(before)
    assert run._log.losses.last_loss == 70_000.25


@pytest.mark.parametrize("steps", ["40", 40.5])
def test_a_total_that_is_no_whole_number_is_refused(attach: Any, steps: Any) -> None:
    with pytest.raises(UserError, match=r"total_steps=.*give a whole number"):
        attach(*model_and_optimizer(), total_steps=steps)


@pytest.mark.parametrize("samples", [32.0, np.int64(32), torch.tensor(32), torch.tensor([32.0])], ids=repr)
def test_a_snapshot_of_samples_that_a_tensor_has_counted_is_resumed_from(attach: Any, samples: Any) -> None:
    """Its manifest could not be read again, so every snapshot of the run was set aside, and the next attempt began
    anew.
    """
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    for number in range(3):
        run.step_end(step(model, optimizer), samples=samples, epoch_end=np.bool_(number == 1))
    run.finish()
    resumed = attach(*model_and_optimizer())
    assert (resumed.resume(), resumed.samples, resumed.epoch) == (3, 96, 1)


@pytest.mark.parametrize("samples", ["32", 32.5, -32, float("nan"), torch.ones(2)], ids=repr)
def test_samples_that_are_no_whole_number_are_refused(attach: Any, samples: Any) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    step(model, optimizer)
    with pytest.raises(UserError, match=r"run.step_end\(…, samples=.*give a whole number"):
        run.step_end(samples=samples)


@pytest.mark.parametrize("config", [UserDict(lr=0.1), MappingProxyType({"lr": 0.1})], ids=lambda of: type(of).__name__)
def test_settings_in_a_mapping_that_is_no_dict_are_in_a_snapshot_that_is_resumed_from(attach: Any, config: Any) -> None:
    """Such as a DictConfig of OmegaConf: what was noted was its text, and no manifest could be read again."""
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, config={"optimizer": config})
    run.resume()
    run.step_end(step(model, optimizer))
    run.finish()
    folder = Path(run._snapshots.directory, f"step-{1:012d}")
    assert Manifest.read(folder).config == {"optimizer": {"lr": 0.1}}
    assert attach(*model_and_optimizer(), config=config).resume() == 1


@pytest.mark.parametrize("config", [Namespace(lr=0.1), ["lr"], "lr", {("a", "b"): 1}], ids=repr)
def test_settings_that_are_no_mapping_are_refused(attach: Any, config: Any) -> None:
    with pytest.raises(UserError, match=r"attach\(…, config=…\): the settings "):
        attach(*model_and_optimizer(), config=config)


def test_a_phase_is_shown_and_its_time_is_no_step(attach: Any, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    run.step_end(step(model, optimizer))
    with run.phase("validate"):
        run.beat()
        (beat,) = read_heartbeats(tmp_path / "run")
        assert beat["phase"] == "validate"
    (beat,) = read_heartbeats(tmp_path / "run")
    assert beat["phase"] == "train"
    assert "validate" in beat["phaseSeconds"]


def test_a_step_has_waited_for_what_its_loop_fetched_other_than_in_a_phase(
    attach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Late(Dataset[Tensor]):
        """Three samples, each a second after it is asked for."""

        def __getitem__(self, index: int) -> Tensor:
            nonlocal now
            now += 1.0
            return torch.ones(1)

        def __len__(self) -> int:
            return 3

    monkeypatch.setattr(data_waits, "perf_counter", lambda: now)
    model, optimizer = model_and_optimizer()
    for _ in range(2):  # the second run of a process neither counts twice, nor what was fetched before it
        run = attach(model, optimizer)
        run.resume()
        for _ in DataLoader(Late()):
            run.step_end(step(model, optimizer))
            with run.phase("validate"):
                list(DataLoader(Late()))
        run.finish()
        (beat,) = read_heartbeats(tmp_path / "run")
        waits = beat["counters"]["dataSeconds"]
        assert (sum(waits["counts"]), waits["sum"], beat["dataSecondsMedian"]) == (3, 3.0, 1.0)
        list(DataLoader(Late()))


def test_the_loss_of_the_last_step_is_reported_at_the_end(attach: Any, tmp_path: Path) -> None:
    """While it trains, the report of a step has the loss of the one before: to have its own, the step would wait."""
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer)
    run.resume()
    for loss in (3.0, 2.0, 1.0):
        step(model, optimizer)
        run.step_end(loss)
    run.finish()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert (beat["step"], beat["loss"]) == (3, 1.0)


def test_an_unknown_phase_names_those_that_there_are(attach: Any) -> None:
    with pytest.raises(UserError, match="the phases are load, validate, save"), attach().phase("compile"):
        pass


def test_logged_values_reach_the_status_and_tensorboard(attach: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, global_batch=2)
    run.resume()
    run.step_end(step(model, optimizer))
    run.log({"val/loss": 2.5}, accuracy=torch.tensor(0.75))
    run.finish(final_accuracy=0.8)
    (beat,) = read_heartbeats(tmp_path / "run")
    assert beat["metrics"] == {"val/loss": 2.5, "accuracy": 0.75, "final_accuracy": 0.8}
    assert (beat["phase"], beat["samples"], beat["learningRate"]) == ("done", 2, 0.1)
    assert beat["epoch"] is None, "nothing has said that an epoch ended"
    events = EventAccumulator(str(tmp_path / "shared" / "logs" / "job" / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("val/loss")] == [(1, 2.5)]


@pytest.mark.parametrize("name", ["a b", "", "1st", "x" * 65])
def test_a_name_that_no_series_can_have_is_an_error(attach: Any, name: str) -> None:
    with pytest.raises(UserError, match=r"is no name of a value"):
        attach().log({name: 1.0})


def test_a_value_that_is_no_number_is_an_error(attach: Any) -> None:
    with pytest.raises(UserError, match="accuracy is 'high', which is not a number"):
        attach().log(accuracy="high")


def test_a_run_logs_a_bounded_number_of_values(attach: Any, tmp_path: Path, capsys: Any) -> None:
    run = attach()
    for number in range(MOST_VALUES + 5):
        run.log({f"value{number}": 1.0})
    run.log(value0=2.0)
    run.resume()
    run.finish()
    (beat,) = read_heartbeats(tmp_path / "run")
    assert len(beat["metrics"]) == MOST_VALUES
    assert beat["metrics"]["value0"] == 2.0
    assert capsys.readouterr().err.count("is not reported") == 1


def test_values_that_come_together_beyond_the_bound_are_refused_once(attach: Any, capsys: Any) -> None:
    run = attach()
    for _ in range(3):
        run.log({f"value{number}": 1.0 for number in range(MOST_VALUES + 2)})
    assert capsys.readouterr().err.count("is not reported: a run logs 64 values") == 1


def test_help_does_not_print_the_environment() -> None:
    assert "environ(" not in str(inspect.signature(importlib.import_module("ddp_trainer.client.attach").attach))


def test_the_digest_of_submitted_code_is_in_snapshots_and_in_the_event_that_begins_the_run(attach, tmp_path) -> None:
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, environ={"DDPJOB_CODE_DIR": "/etc/ddpjob/code", "DDPJOB_CODE_SHA256": "ab" * 32})
    run.resume()
    for _ in range(2):
        run.step_end(step(model, optimizer))
    run.finish()
    (manifest,) = (tmp_path / "shared/checkpoints/job").glob("step-*2/manifest.json")
    assert Manifest.read(manifest.parent).code_sha256 == "ab" * 32
    events = [json.loads(line) for line in (tmp_path / "shared/logs/job/events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["event"] == "started")["codeSha256"] == "ab" * 32


class Incomplete(UserDict[str, Any]):
    """As a DictConfig with a value that has still to be given."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(f"Missing mandatory value: {key}")


@pytest.mark.parametrize("value", [Incomplete(b=1), MappingProxyType({("a", 1): 1})], ids=["missing", "keys"])
def test_a_setting_that_is_no_json_is_noted_as_text(value: Any) -> None:
    assert isinstance(settings({"cfg": value})["cfg"], str)


def test_an_interpolation_of_omegaconf_is_noted_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value may be a secret of the environment, and the volume is for others to read."""
    config = UserDict(token="resolved")

    def to_container(value: Any, *, resolve: bool, enum_to_str: bool) -> dict[str, str]:
        assert value is config
        assert enum_to_str
        return {"token": "resolved" if resolve else "${oc.env:T}"}

    of = SimpleNamespace(is_config=lambda value: value is config, to_container=to_container)
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=of))
    assert settings({"cfg": config}) == {"cfg": {"token": "${oc.env:T}"}}


def test_a_total_of_minus_1_is_none(attach: Any) -> None:
    assert attach(*model_and_optimizer(), total_steps=-1)._steps.total_steps is None


def test_what_is_raised_while_a_number_is_waited_for_is_not_the_scripts_error() -> None:
    class Lost:
        def __int__(self) -> int:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        whole("run.step_end", "samples", Lost())
