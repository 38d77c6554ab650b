"""The tasks that ship here, and how one of the user's own is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.tasks import BUILT_IN, load_task

SMALL = {"tiny_lm": {"samples": 20, "n_layers": 1}}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_has_a_finite_loss_on_its_own_data_and_the_same_data_each_time(name: str) -> None:
    torch.manual_seed(0)
    task, again = load_task(name, SMALL.get(name)), load_task(name, SMALL.get(name))
    loader = torch.utils.data.DataLoader(task.train_dataset(), batch_size=4)
    other = torch.utils.data.DataLoader(again.train_dataset(), batch_size=4)
    batch, same = next(iter(loader)), next(iter(other))
    assert torch.equal(task.inputs(batch), task.inputs(same))
    output = task.model()(task.inputs(batch))
    assert torch.isfinite(task.loss(output, batch))
    right, judged = task.score(output, batch) or (torch.zeros(()), 0)
    assert 0 <= int(right) <= judged


def test_the_simple_model_is_784_256_10() -> None:
    shapes = [tuple(parameter.shape) for parameter in load_task("simple_mlp").model().parameters()]
    assert shapes == [(256, 784), (256,), (10, 256), (10,)]


def test_training_and_held_out_digits_share_no_image() -> None:
    task = load_task("digits")
    train, held_out = task.train_dataset(), task.eval_dataset()
    assert (len(train), len(held_out)) == (1437, 360)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "task 'digit' is unknown: did you mean 'digits'? For one of your own, write --task package.mod"),
        ("nowhere:build", {}, "task 'nowhere:build': there is no module 'nowhere'; install it in the image or add"),
        ("own:missing", {}, "task 'own:missing': module own has nothing callable named 'missing'"),
        ("own:number", {}, "task 'own:number' built a int, which is no ddp_trainer.tasks.Task: subclass Task"),
        ("digits", {"widht": 3}, "task 'digits' cannot be built with widht=3: "),
        ("./own.py:number", {}, "'./own.py' is no name of a module: write --task package.module:build, such as own_t"),
        ("own.py:number", {}, "task 'own.py:number': 'own.py' is no name of a module"),
        (":number", {}, "task ':number': '' is no name of a module"),
        ("digits", {"width": "wide"}, "task 'digits': width='wide' must be a whole number of at least 1"),
        ("digits", {"dropout": 5}, "task 'digits': dropout=5 must be a number from 0 to 1"),
        ("digits", {"dropout": True}, "task 'digits': dropout=True must be a number from 0 to 1"),
        ("toy_linear", {"samples": -5}, "task 'toy_linear': samples=-5 must be a whole number of at least 1"),
        ("toy_linear", {"samples": 1.5}, "task 'toy_linear': samples=1.5 must be a whole number of at least 1"),
        ("simple_mlp", {"hidden": 0}, "task 'simple_mlp': hidden=0 must be a whole number of at least 1"),
        ("tiny_lm", {"n_heads": 0}, "task 'tiny_lm': n_heads=0 must be a whole number of at least 1"),
        ("tiny_lm", {"dropout": -0.1}, "task 'tiny_lm': dropout=-0.1 must be a number from 0 to 1"),
        ("tiny_lm", {"d_model": 7, "n_heads": 7}, "task 'tiny_lm': d_model=7 must be even"),
        ("tiny_lm", {"seq_len": 1}, "seq_len=1 at least 2, a token and the one that follows"),
        ("tiny_lm", {"tokens": "web"}, "tokens='web' is unknown; write tokens=stdlib or tokens=random"),
    ],
)
def test_a_task_that_cannot_be_is_refused_with_the_fix(
    name: str, options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def number(): return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as refusal:
        load_task(name, options)
    assert message in str(refusal.value)
