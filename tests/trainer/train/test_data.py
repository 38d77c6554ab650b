"""The order of the data: properties that hold for any size, cut and number of ranks."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.waiting import PATIENCE_SECONDS
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddp_trainer.client.batches import BatchPlan, micro_batches, mixed_seed, share
from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.rank.data_waits import attached
from ddp_trainer.rank.world import World
from ddp_trainer.train import data
from ddp_trainer.train.data import Cursor, Loader, every_nth
from ddp_trainer.train.data_workers import DataWorkerDied, _SeededSamples

# Other work on this machine must not fail a property.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")

plans = st.builds(
    BatchPlan,
    samples=st.integers(1, 120),
    global_batch=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
    keep_last=st.just(True),
)
worlds = st.integers(1, 9)
micro_sizes = st.none() | st.integers(1, 20)


@settings(max_examples=examples(40))
@given(plans, st.integers(0, 5), st.data())
def test_every_sample_comes_once_an_epoch_whatever_ranks_come_and_go_in_it(
    plan: BatchPlan, epoch: int, data: st.DataObject
) -> None:
    cursor = Cursor(plan, epoch=epoch)
    seen: list[int] = []
    while cursor.epoch == epoch:
        # An attempt of the run: it starts from the last one's state, with another number of ranks, and ends after
        # some steps.
        resumed = Cursor(plan)
        resumed.load_state_dict(cursor.state_dict())
        cursor = resumed
        ranks, micro = data.draw(worlds), data.draw(micro_sizes)
        steps = list(plan.batches(epoch, cursor.offset))
        for batch in steps[: data.draw(st.integers(1, len(steps)))]:
            for rank in range(ranks):
                for indices, count in micro_batches(batch, rank, ranks, micro):
                    seen += indices[:count].tolist()
            cursor.advance(len(batch))
    assert sorted(seen) == list(range(plan.samples))


@given(plans, worlds, micro_sizes)
def test_every_rank_takes_part_in_every_micro_batch_and_shares_differ_by_one_sample_at_most(
    plan: BatchPlan, ranks: int, micro: int | None
) -> None:
    *_, last = plan.batches(0)
    cuts = [micro_batches(last, rank, ranks, micro) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in cuts}) == 1
    assert all(len(indices) >= 1 for of_rank in cuts for indices, _ in of_rank)
    assert all(count <= (micro or count) for of_rank in cuts for _, count in of_rank)
    counts = [sum(count for _, count in of_rank) for of_rank in cuts]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == len(last)


@given(plans, st.integers(0, 40))
def test_steps_and_samples_follow_from_where_the_cursor_stands(plan: BatchPlan, steps: int) -> None:
    cursor, samples = Cursor(plan), 0
    for _ in range(steps):
        batch = next(plan.batches(cursor.epoch, cursor.offset))
        samples += len(batch)
        ended = cursor.advance(len(batch))
        assert ended == (cursor.offset == 0)
    assert (cursor.steps, cursor.samples) == (steps, samples)


@given(st.integers(1, 300), worlds, st.integers(1, 50))
def test_validation_looks_at_every_sample_once_in_equally_many_batches_a_rank(
    samples: int, ranks: int, batch: int
) -> None:
    shares = [list(every_nth(samples, rank, ranks, batch)) for rank in range(ranks)]
    assert sorted(torch.cat([indices for of_rank in shares for indices in of_rank]).tolist()) == list(range(samples))
    assert len({len(of_rank) for of_rank in shares}) == 1
    assert all(len(indices) <= batch for of_rank in shares for indices in of_rank)


def test_what_is_in_order_is_not_listed_before_it_is_loaded() -> None:
    """A list of that many would have no room anywhere."""
    many = 10**15  # more than any address space
    assert next(every_nth(many, 1, 4, 2)).tolist() == [1, 5]
    assert next(BatchPlan(samples=many, global_batch=4, shuffle=False).batches(0, many - 2)).tolist() == [
        many - 2,
        many - 1,
    ]


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = [
        tuple(BatchPlan(samples=50, global_batch=10, seed=seed).order(epoch).tolist())
        for seed in (0, 1, 2**32 - 1)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)


def test_a_dropped_last_batch_is_left_out_of_the_epoch() -> None:
    plan = BatchPlan(samples=10, global_batch=4, keep_last=False)
    assert [len(batch) for batch in plan.batches(0)] == [4, 4]
    assert (plan.steps_per_epoch, plan.samples_per_epoch) == (2, 8)


def test_dropping_the_only_batch_is_refused() -> None:
    with pytest.raises(UserError, match="--global-batch 11 is more than the 10 samples there are"):
        BatchPlan(samples=10, global_batch=11, keep_last=False)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"global_batch": 8}, "--global-batch"),
        ({"seed": 1}, "--seed"),
        ({"samples": 101}, "--task"),
        ({"keep_last": False}, "--last-batch"),
    ],
)
def test_a_position_in_another_order_is_refused_by_name(other: dict[str, Any], named: str) -> None:
    base: dict[str, Any] = {"samples": 100, "global_batch": 10, "seed": 0}
    with pytest.raises(UserError, match=named):
        Cursor(BatchPlan(**base)).load_state_dict(Cursor(BatchPlan(**(base | other))).state_dict())


def test_shares_are_in_the_order_of_the_batch() -> None:
    batch = torch.tensor([7, 3, 9, 1, 5])
    assert [share(batch, rank, 2).tolist() for rank in range(2)] == [[7, 3, 9], [1, 5]]


class Augmented(Dataset[torch.Tensor]):
    """Samples with a random part, as an augmentation has."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(1)])


def loaded(ranks: int, workers: int, offset: int = 0, micro: int | None = None) -> dict[float, float]:
    """Sample -> its augmentation, over all ranks."""
    plan = BatchPlan(samples=23, global_batch=8, seed=5)
    found: dict[float, float] = {}
    for rank in range(ranks):
        loader = Loader(Augmented(), plan, World(rank=rank, size=ranks), micro_batch=micro, workers=workers)
        for step in loader.epoch(2, offset):
            for part in step.micro_batches:
                found |= dict(part.batch[: part.count].tolist())
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_workers_draw_the_same_augmentation_for_a_sample_whatever_their_number_and_the_ranks() -> None:
    reference = loaded(ranks=1, workers=1)
    assert sorted(reference) == [float(index) for index in range(23)]
    assert loaded(ranks=2, workers=2, micro=3) == reference
    resumed = loaded(ranks=1, workers=2, offset=16)
    assert len(resumed) == 7
    assert resumed.items() <= reference.items()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_loading_with_workers_leaves_the_random_numbers_of_training_alone() -> None:
    torch.manual_seed(1)
    loaded(ranks=1, workers=1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_the_same_workers_load_every_epoch() -> None:
    loader = Loader(Augmented(), BatchPlan(samples=23, global_batch=8), World(), workers=2)
    before = set(multiprocessing.active_children())
    list(loader.epoch(0))
    workers = set(multiprocessing.active_children()) - before
    list(loader.epoch(1))
    assert len(workers) == 2
    assert set(multiprocessing.active_children()) - before == workers


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
@pytest.mark.parametrize("steps", [0, 1])
def test_workers_are_told_to_leave_as_soon_as_nobody_needs_them(steps: int) -> None:
    """In a cycle they would wait for the garbage collector, which closes their queues before they are asked to stop."""
    loader = Loader(Augmented(), BatchPlan(samples=23, global_batch=1), World(), workers=1)
    pool = weakref.ref(loader._processes)
    gc.disable()
    try:
        epoch = loader.epoch(0)
        for _ in range(steps):  # the rest of the epoch is not trained on
            next(epoch)
        del epoch, loader
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.processes
def test_workers_of_a_forkserver_outlive_the_sigterm_of_the_process_group() -> None:
    script = [sys.executable, str(Path(__file__).with_name("signalled_workers.py"))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_SECONDS, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "loaded 8\n"), done.stderr


class Broken(Augmented):
    """Raises what torch itself raises for a worker that died."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise RuntimeError(f"sample {index} cannot be read")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_an_exception_of_the_data_set_is_not_taken_for_the_death_of_its_worker() -> None:
    loader = Loader(Broken(), BatchPlan(samples=23, global_batch=8), World(), workers=1)
    with pytest.raises(RuntimeError, match=r"sample \d+ cannot be read") as raised:
        list(loader.epoch(0))
    assert not isinstance(raised.value, DataWorkerDied)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_a_worker_that_died_between_two_epochs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(Augmented(), BatchPlan(samples=23, global_batch=8), World(), workers=1)
    before = set(multiprocessing.active_children())
    list(loader.epoch(0))
    (worker,) = set(multiprocessing.active_children()) - before
    # torch looks for the processes itself where no signal has come, every 5 s
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.01,))
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        worker.kill()
        worker.join()
        with pytest.raises(
            DataWorkerDied, match=rf"rank 0 cannot load data: DataLoader worker \(pid {worker.pid}\) exited"
        ):
            list(loader.epoch(1))
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.processes
def test_workers_are_asked_for_no_more_steps_than_they_load_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned as a whole, an epoch of millions of steps takes minutes and gigabytes."""
    planned: list[Any] = []

    def counted(*args: Any) -> Any:
        planned.append(args)
        return micro_batches(*args)

    monkeypatch.setattr(data, "micro_batches", counted)
    plan = BatchPlan(samples=23, global_batch=1)
    loader = Loader(Augmented(), plan, World(), workers=2, prefetch=3)
    for epoch in (0, 1):  # the same workers
        planned.clear()
        steps = loader.epoch(epoch, offset=2)
        taken = [next(steps)]
        assert len(planned) <= 2 * 3 + 1
        taken += steps
        samples = [int(step.micro_batches[0].batch[0, 0]) for step in taken]
        assert samples == plan.order(epoch)[2:].tolist()


@settings(max_examples=examples(20))
@given(micro_sizes)
def test_workers_and_the_rank_itself_load_the_same_batches(micro: int | None) -> None:
    plan = BatchPlan(samples=23, global_batch=8)
    dataset = TensorDataset(torch.arange(23), torch.arange(23) * 2)
    steps = list(Loader(dataset, plan, World(), micro_batch=micro).epoch(0))
    by_sample = [
        [dataset[index] for index in indices.tolist()]
        for batch in plan.batches(0)
        for indices, _ in micro_batches(batch, 0, 1, micro)
    ]
    parts = [part.batch for step in steps for part in step.micro_batches]
    assert [list(zip(*part, strict=True)) for part in parts] == by_sample


class Doubled(TensorDataset):
    """Tensors with an augmentation."""

    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def total(samples: list[Any]) -> Any:
    return torch.stack([torch.stack(list(sample)).sum() for sample in samples])


@pytest.mark.parametrize(
    ("kind", "collate", "wanted"), [(Doubled, None, [[0, 2, 4]]), (TensorDataset, total, [0, 1, 2])]
)
def test_samples_of_tensors_are_what_their_own_class_and_collate_make_of_them(kind, collate, wanted) -> None:
    (step,) = Loader(
        kind(torch.arange(3)), BatchPlan(samples=3, global_batch=3, shuffle=False), World(), collate=collate
    ).epoch(0)
    (part,) = step.micro_batches
    assert (part.batch.tolist() if collate else [each.tolist() for each in part.batch]) == wanted


def test_batches_may_be_named_tuples(volume) -> None:
    # 10 samples in micro-batches of 4, which a pipeline joins, fills up and cuts again
    batches = ("--global-batch", "10", "--micro-batch", "4", "--max-steps", "2", "--eval-batch", "360")
    volume.trained(2, "--task", "seeded_tasks:Named", "--strategy", "pipeline", *batches)
    assert sorted(volume.losses()) == [1, 2]


@pytest.mark.processes
def test_the_wait_of_a_step_for_workers_is_counted_once(train_here) -> None:
    attached()  # from here on the time of each fetch from a DataLoader is taken, which these workers are on top of
    flags = ("--task=seeded_tasks:Unstable", "--task-options=step=0", "--global-batch=16")
    (beat,) = train_here(*flags, "--workers=1", "--max-steps=4").beats()
    assert (sum(beat["counters"]["dataSeconds"]["counts"]), beat["step"]) == (4, 4)


class Drawn(Dataset[torch.Tensor]):
    """Each sample is drawn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def test_a_sample_is_drawn_as_by_torchs_own_seed_which_no_device_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """To queue a seed for a device that is not in use takes longer than to load a small sample."""
    drawn = _SeededSamples(Drawn(), seed=7, may_use_cuda=False)
    expected = []
    for index in range(3):
        torch.manual_seed(mixed_seed(7, 2, index))
        expected.append(torch.rand(3))
    queued: list[int] = []
    for device in (torch.cuda, torch.xpu):
        monkeypatch.setattr(device, "manual_seed_all", queued.append)
    assert all(torch.equal(drawn[2, index], expected[index]) for index in range(3))
    assert queued == []
    assert torch.equal(_SeededSamples(Drawn(), seed=7, may_use_cuda=True)[2, 0], expected[0])
    assert mixed_seed(7, 2, 0) in queued, "its first sample may be drawn on the GPU"
