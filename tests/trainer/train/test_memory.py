"""Out of memory on one rank: no deadlock, the same training with smaller micro-batches."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.documented import message
from torch import nn
from torch.distributed import DistBackendError
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from ddp_trainer.client.batches import BatchPlan
from ddp_trainer.contract.outcomes import classify
from ddp_trainer.rank.world import World
from ddp_trainer.tasks import load_task
from ddp_trainer.train.config import TrainConfig
from ddp_trainer.train.data import Loader, recut
from ddp_trainer.train.memory import MicroBatches, MicroBatchNote, is_out_of_memory, starting_micro_batch
from ddp_trainer.train.optim import build_optimizer
from ddp_trainer.train.precision import Precision
from ddp_trainer.train.strategies import strategy_class

HUNGRY = ("--task", "seeded_tasks:Hungry", "--max-steps", "12")


@pytest.mark.parametrize("name", ["hungry-forward", "hungry-backward"])
def test_all_ranks_halve_the_micro_batch_together_and_train_as_if_nothing_had_been(run, difference, name: str) -> None:
    assert [event["microBatch"] for event in run(2, name).events("micro_batch_lowered")] == [16, 8]
    assert message("A rank has too little memory", 0).search((run(2, name).root / "output.txt").read_text())
    assert difference(run(2, name).losses(), run(0, "hungry").losses()) < 1e-5


def test_memory_that_fails_later_ends_the_attempt_and_the_next_starts_with_half(volume) -> None:
    late = (*HUNGRY, "--task-options", "first=11", "--task-options", "limit=16", "--task-options", "always=false")
    failed = volume.train(2, *late)
    assert failed.returncode != 0
    reported = message("A rank has too little memory", 1).search(failed.stderr)
    assert reported is not None, failed.stderr
    assert reported[0].startswith("rank 1 ran out of memory in step 10 with micro-batches of 32 samples")
    volume.trained(2, *late, DDPJOB_ATTEMPT="1")
    assert [event["microBatch"] for event in volume.events("micro_batch_lowered")] == [16]
    assert [(beat["counters"]["outOfMemory"], beat["metrics"]["micro_batch"]) for beat in volume.beats()] == [
        (1, 16)
    ] * 2
    assert sorted(volume.losses()) == list(range(1, 13))


@pytest.mark.parametrize(
    ("asked", "had", "lower"),
    [pytest.param((), 8, 4, id="of its own choice"), pytest.param(("--micro-batch", "16"), 16, 8, id="as asked")],
)
def test_a_pipeline_without_memory_for_a_micro_batch_gets_there_by_halves(
    volume, trained_once, difference, asked: tuple[str, ...], had: int, lower: int
) -> None:
    pipeline = ("--strategy", "pipeline", "--max-steps", "8", "--task-options")
    hungry = ("--task", "seeded_tasks:HungryStage", *pipeline, f"limit={lower}", *asked)
    attempt = 0
    while had > lower:
        failed = volume.train(2, *hungry, DDPJOB_ATTEMPT=str(attempt))
        reported = message("A rank has too little memory", 1).search(failed.stderr)
        assert reported is not None, failed.stderr
        assert reported[0].startswith(f"rank 1 ran out of memory in step 1 with micro-batches of {had} samples")
        had, attempt = had // 2, attempt + 1
    volume.trained(2, *hungry, DDPJOB_ATTEMPT=str(attempt))
    enough = trained_once(2, "--task", "seeded_tasks:HungryStage", *pipeline, "limit=64")
    assert difference(volume.losses(), enough.losses()) < 1e-5


def test_memory_that_fails_in_validation_leaves_the_next_attempt_smaller_batches(volume) -> None:
    options = ("--task-options", "where=validation", "--task-options", "limit=64")
    arguments = (*HUNGRY, *options, "--eval-batch", "128", "--validate-every", "6steps")
    failed = volume.train(2, *arguments)
    reported = message("A rank has too little memory", 2).search(failed.stderr)
    assert reported is not None, failed.stderr
    assert reported[0].startswith("rank 1 ran out of memory in the validation after step 6 with micro-batches of 128")
    volume.trained(2, *arguments, DDPJOB_ATTEMPT="1")
    assert [event["microBatch"] for event in volume.events("micro_batch_lowered")] == [64]
    assert [event["step"] for event in volume.events("validated")] == [6, 12]


def test_memory_that_fails_where_ddp_learns_its_graph_leaves_a_note_too(volume) -> None:
    # the first loss is the rehearsal, the next ones meet the other ranks
    late = ("--task-options", "first=2", "--task-options", "limit=16", "--static-graph")
    failed = volume.train(2, *HUNGRY, *late)
    assert message("A rank has too little memory", 1).search(failed.stderr), failed.stderr
    volume.trained(2, *HUNGRY, *late, DDPJOB_ATTEMPT="1")
    assert [event["microBatch"] for event in volume.events("micro_batch_lowered")] == [16]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False),
        (DistBackendError("ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"), True),
        (caused(RuntimeError("Stage 1 failed to run forward"), torch.OutOfMemoryError("CUDA out of memory")), True),
        (caused(RuntimeError("Stage 1 failed to run forward"), ValueError("shapes")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_is_what_the_launcher_calls_so(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
    assert (classify(error)[1] == "OutOfMemory") == is_it


def test_when_one_sample_is_too_many_every_rank_gives_up_with_advice(volume) -> None:
    failed = volume.train(2, *HUNGRY, "--task-options", "limit=0", "--global-batch", "4")
    assert failed.returncode != 0
    assert message("A rank has too little memory", 3).search(failed.stderr), failed.stderr


@pytest.mark.parametrize(
    ("strategy", "settings", "is_resumed", "tensors"),
    [
        ("single", {"optimizer": "sgd"}, False, 0),
        ("single", {"optimizer": "sgd", "momentum": 0.9}, False, 1),
        ("single", {"optimizer": "adamw"}, False, 2),
        ("single", {"optimizer": "adam", "micro_batch": 8}, False, 3),
        ("single", {"optimizer": "adam", "micro_batch": 8}, True, 1),
        ("ddp", {"optimizer": "adam", "micro_batch": 8}, False, 2),
    ],
)
def test_a_rehearsal_leaves_room_for_what_the_first_step_leaves_for_the_later_ones(
    group: World, strategy: str, settings: dict[str, Any], is_resumed: bool, tensors: int, monkeypatch
) -> None:
    task, config = load_task("toy_linear", {"samples": 24}), TrainConfig(strategy=strategy, **settings)
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def empty_like(parameter: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(parameter.shape)
        made.append(weakref.ref(tensor))
        return tensor

    trained = strategy_class(strategy)(config, group, task, Precision("fp32", group.device))
    trained.wrap(task.model())
    optimizer = build_optimizer(config, trained.parameters(), group.device)
    plan = BatchPlan(samples=24, global_batch=24)
    (batch,) = Loader(task.train_dataset(), plan, group, micro_batch=config.micro_batch).epoch(0)
    if is_resumed:
        trained.forward_backward(batch)
        optimizer.step()
    trained.model.register_forward_hook(lambda *_: held.append(sum(place() is not None for place in made)))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert trained.probe_memory(batch, optimizer)
    weight_and_bias = 2
    assert held == [tensors * weight_and_bias]
    assert [place() for place in made] == [None] * len(made)


class Recomputing(nn.Module):
    """A model whose activations are recomputed in a nested backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(self.last, self.first(inputs), use_reentrant=True)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_model_that_only_backward_can_recompute_is_trained(group: World, strategy: str) -> None:
    """The rehearsal takes its gradient with `torch.autograd.grad`, which torch refuses there."""
    task, config = load_task("toy_linear", {"samples": 24}), TrainConfig(strategy=strategy)
    trained = strategy_class(strategy)(config, group, task, Precision("fp32", group.device))
    trained.wrap(Recomputing())
    optimizer = build_optimizer(config, trained.parameters(), group.device)
    (batch,) = Loader(task.train_dataset(), BatchPlan(samples=24, global_batch=24), group).epoch(0)
    assert trained.probe_memory(batch, optimizer)
    trained.forward_backward(batch)
    assert all(parameter.grad is not None for parameter in trained.parameters())


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 24), st.integers(1, 4), st.none() | st.integers(1, 12), st.integers(1, 8))
def test_a_batch_cut_anew_is_cut_as_if_it_had_been_from_the_start(
    samples: int, global_batch: int, ranks: int, before: int | None, after: int
) -> None:
    plan = BatchPlan(samples=samples, global_batch=global_batch)
    dataset = TensorDataset(torch.arange(samples))
    for rank in range(ranks):
        world = World(rank=rank, size=ranks)
        size = min(before, after) if before else after
        wanted = Loader(dataset, plan, world, micro_batch=size).epoch(0)
        for step, other in zip(Loader(dataset, plan, world, micro_batch=before).epoch(0), wanted, strict=True):
            cut = recut(step, ranks, size)
            counted = [(part.batch[0][: part.count].tolist(), part.count) for part in cut.micro_batches]
            assert counted == [(part.batch[0][: part.count].tolist(), part.count) for part in other.micro_batches]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """As a task's `collate` does it: to the longest of these samples."""
    return pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_micro_batches_that_are_padded_to_different_lengths_are_cut_anew(after: int) -> None:
    samples = [torch.full((length,), length) for length in range(1, 25)]
    for rank in range(2):
        world, plan = World(rank=rank, size=2), BatchPlan(samples=24, global_batch=24)
        (loaded,) = Loader(samples, plan, world, micro_batch=6, collate=padded).epoch(0)  # type: ignore[arg-type]
        cut = recut(loaded, 2, after)
        assert [len(part.batch) for part in cut.micro_batches] == [part.count for part in cut.micro_batches]
        assert max(part.count for part in cut.micro_batches) <= after
        before, now = ([int(row.max()) for part in step.micro_batches for row in part.batch] for step in (loaded, cut))
        assert now == before


def test_ranks_agree_on_smaller_micro_batches_however_their_samples_are_padded(tmp_path) -> None:
    lowered: list[list[int]] = []
    for lengths in ([1] * 30, range(1, 31)):
        samples = [torch.ones(length) for length in lengths]
        plan = BatchPlan(samples=30, global_batch=30)
        (loaded,) = Loader(samples, plan, World(), micro_batch=16, collate=padded).epoch(0)  # type: ignore[arg-type]
        found = MicroBatches(World(), 1, MicroBatchNote(tmp_path / "micro_batch.json", "uid"), limit=None)
        lowered.append([])
        found.on_lowered = lowered[-1].append
        with pytest.raises(torch.OutOfMemoryError):
            found.fit(loaded, lambda batch: False, step=1)
    assert lowered == [[7, 3, 1]] * 2


@pytest.mark.parametrize(
    ("own", "other", "agreed", "lowered"),
    [(None, None, None, []), (None, 8, 8, [8]), (8, None, 8, []), (8, 4, 4, [4]), (4, 8, 4, [])],
)
def test_ranks_that_recover_live_agree_on_the_least_limit_that_one_of_them_knows(
    tmp_path, monkeypatch, own: int | None, other: int | None, agreed: int | None, lowered: list[int]
) -> None:
    """They validate in as many batches, and meet after each: one with more of them would be out of step."""
    waited: list[object] = []

    def all_reduce(least: torch.Tensor, *, op: object, async_op: bool) -> str:
        assert op == dist.ReduceOp.MIN
        assert async_op
        if other is not None:
            least.clamp_(max=other)
        return "work"

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    note = MicroBatchNote(tmp_path / "micro_batch.json", "uid")
    found, said = MicroBatches(World(rank=0, size=2), 2, note, limit=own), []
    found.on_lowered = said.append
    found.agree(waited.append)
    assert (found.limit, said, waited) == (agreed, lowered, ["work"])


def test_a_loader_takes_no_more_at_once_than_the_ranks_have_agreed_on() -> None:
    loader = Loader(TensorDataset(torch.arange(12)), BatchPlan(samples=12, global_batch=12), World(), micro_batch=6)
    for limit, counts in ((4, [4, 4, 4]), (None, [6, 6]), (8, [6, 6])):
        loader.take_at_most(limit)
        (step,) = loader.epoch(0)
        assert [part.count for part in step.micro_batches] == counts


@pytest.mark.parametrize(
    ("asked", "limit", "live_ranks", "size"),
    [
        (None, None, None, None),
        (None, None, 3, 8),  # whatever number of ranks is left later
        (None, None, 5, 5),
        (None, 4, 3, 4),
        (6, None, 3, 6),
        (12, None, 3, 12),
    ],
)
def test_ranks_that_recover_live_take_no_more_at_once_than_while_all_are_there(
    asked: int | None, limit: int | None, live_ranks: int | None, size: int | None
) -> None:
    config = TrainConfig(global_batch=24, micro_batch=asked)
    assert starting_micro_batch(config, World(), limit, live_ranks=live_ranks) == size
