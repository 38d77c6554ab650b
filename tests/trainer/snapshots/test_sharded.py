"""A model that no rank holds whole is saved in parts and read back by any number of ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tests.support.starting import starts_processes
from tests.trainer.snapshots.under_torchrun import torchrun
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor

from ddp_trainer.snapshots import shard_storage
from ddp_trainer.snapshots.__main__ import main
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.sharded import _Planner, _read_structure
from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest
from ddp_trainer.snapshots.trust.store import SnapshotStore

HERE = Path(__file__).parent
INDEX_FAULTS = ("the_index_cannot_be_read_on_one_rank", "the_index_cannot_be_read_at_first")


def seen(out: Path, scenario: str, world_size: int, rank: int = 0) -> Any:
    return json.loads((out / f"{scenario}-{world_size}-{rank}.json").read_text())


@pytest.fixture(scope="module")
@starts_processes
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, and what two and then one made of it."""
    out = tmp_path_factory.mktemp("sharded")
    faults = (
        "one_rank_cannot_write",
        "the_quota_of_one_rank_is_used_up",
        "one_rank_loses_what_it_wrote",
        "the_disk_of_one_rank_hangs",
    )
    sizes = ("rank_0_writes_most", "rank_0_takes_long", "rank_0_reads_for_long")
    stages = ("pipeline", "pipeline_grown", "pipeline_retyped", *INDEX_FAULTS, "the_gpu_of_one_rank_fails")
    torchrun(2, "sharded_ranks.py", out, "save", "resume", "another_layer", *faults, *sizes, *stages)
    torchrun(1, "sharded_ranks.py", out, "resume", "pipeline_resized")
    return out


def test_every_rank_has_written_its_own_part_and_all_of_it_verifies(out: Path) -> None:
    manifest = SnapshotStore(out / "fsdp", keep=1, fence=None).verify(4)
    assert {name for name in manifest.files if name.startswith("shards/")} == {
        "shards/index.json",
        "shards/rank-00000.json",
        "shards/rank-00000.safetensors",
        "shards/rank-00001.json",
        "shards/rank-00001.safetensors",
    }
    sizes = [manifest.files[f"shards/rank-0000{rank}.safetensors"].bytes for rank in (0, 1)]
    assert max(sizes) < 2 * min(sizes), "both ranks hold about half"


@pytest.mark.parametrize("world_size", [2, 1])
def test_parts_saved_by_two_ranks_are_read_exactly_by(out: Path, world_size: int) -> None:
    resumed = seen(out, "resume", world_size)
    assert resumed["step"] == 4
    assert resumed["at_resume"] == seen(out, "save", 2)["at_save"]


def test_resuming_at_the_same_size_is_bitwise(out: Path) -> None:
    for rank in (0, 1):
        unbroken, resumed = seen(out, "save", 2, rank), seen(out, "resume", 2, rank)
        assert resumed["losses"] == unbroken["losses"][4:]
        assert resumed["end"] == unbroken["end"]


def test_resuming_at_another_size_says_that_random_numbers_start_anew(out: Path) -> None:
    assert seen(out, "resume", 1)["events"][:2] == ["reseeded", "resumed"]
    assert seen(out, "resume", 2)["events"][0] == "resumed"


@pytest.fixture(scope="module")
@starts_processes
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which parts have had no gradient when it is saved, over two ranks, then one, then two."""
    out = tmp_path_factory.mktemp("branched")
    torchrun(2, "sharded_ranks.py", out, "branched_unbroken", "branched_first")
    torchrun(1, "sharded_ranks.py", out, "branched_second")
    torchrun(2, "sharded_ranks.py", out, "branched_third")
    return out


@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks"),
    [("branched_first", 2, "branched_second", 1), ("branched_second", 1, "branched_third", 2)],
)
def test_states_come_back_exactly_where_a_parameter_has_had_no_gradient_yet(
    branched: Path, before: str, ranks_before: int, after: str, ranks: int
) -> None:
    saved = seen(branched, before, ranks_before)["at_end"]
    resumed = seen(branched, after, ranks)["at_resume"]
    assert resumed["states"] == saved
    assert "head.weight.exp_avg" in saved
    assert "never.weight.exp_avg" not in saved
    assert ("late.weight.exp_avg" in saved) == (before == "branched_second")


def test_a_run_over_two_ranks_then_one_then_two_ends_as_the_unbroken_one(branched: Path) -> None:
    unbroken, resumed = seen(branched, "branched_unbroken", 2), seen(branched, "branched_third", 2)["at_end"]
    assert resumed.keys() == unbroken.keys()
    for name, values in unbroken.items():
        # one rank adds up the batch in another order than two
        assert resumed[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
@starts_processes
def loaders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States that each of two ranks has for itself, what two made of them and then one."""
    out = tmp_path_factory.mktemp("loaders")
    torchrun(2, "loader_ranks.py", out, "own_loaders", "own_loaders_resumed", "own_loaders_broken")
    torchrun(1, "loader_ranks.py", out, "own_loaders_resumed")
    return out


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_state_back_and_an_epochs_scheduler_goes_on(loaders: Path, rank: int) -> None:
    unbroken, resumed = seen(loaders, "own_loaders", 2, rank), seen(loaders, "own_loaders_resumed", 2, rank)
    assert (unbroken["first"], resumed["first"]) == (0, 6)
    assert resumed["seen"] == unbroken["seen"][6:], "the same losses and learning rates, bit for bit"
    assert [resumed[name] for name in ("position", "order", "weights")] == [
        unbroken[name] for name in ("position", "order", "weights")
    ]
    assert unbroken["position"] == 12 * (1 + rank), "the ranks differ"
    assert resumed["events"] == []


def test_another_number_of_ranks_begins_them_anew_and_says_so(loaders: Path) -> None:
    alone, fresh = seen(loaders, "own_loaders_resumed", 1), seen(loaders, "own_loaders", 2)
    assert alone["first"] == 6
    assert alone["position"] == 6, "it begins at 0, not where one of two ranks stood"
    assert alone["order"] != fresh["order"]
    (message,) = (message for message in alone["events"] if "loader" in message)
    assert message.startswith("loader is of 2 ranks, one each, and this is 1: each begins with the one")


def test_a_state_of_one_rank_that_cannot_be_held_is_an_error_on_all(loaders: Path) -> None:
    first, second = (seen(loaders, "own_loaders_broken", 2, rank) for rank in (0, 1))
    assert first == second
    assert first.startswith("loader of rank 1 cannot be saved: file is a _io.TextIOWrapper")


def test_a_part_that_one_rank_could_not_write_fails_the_save_on_all_and_the_next_works(out: Path) -> None:
    first, second = (seen(out, "one_rank_cannot_write", 2, rank) for rank in (0, 1))
    assert first[:2] == second[:2] == [False, True]
    assert "rank 1: [Errno 5]" in first[2][0]
    assert {path.name for path in (out / "broken").iterdir()} == {"attempts", "step-000000000002"}


def test_a_part_that_one_rank_has_no_room_for_gets_that_of_an_older_snapshot(out: Path) -> None:
    first, second = (seen(out, "the_quota_of_one_rank_is_used_up", 2, rank) for rank in (0, 1))
    assert first[0] is second[0] is True
    assert first[1][-1].startswith(f"snapshot of step 6 was not saved to {out}/quota: the volume is full ("), first[1]
    assert SnapshotStore(out / "quota", keep=1, fence=None).steps() == [5]


def test_what_one_rank_wrote_and_rank_0_reads_otherwise_becomes_no_snapshot(out: Path) -> None:
    bad, then, events = seen(out, "one_rank_loses_what_it_wrote", 2)
    assert (bad, then) == (False, True)
    assert events[0].startswith("rank 1: shards/rank-00001.safetensors, written with "), events[0]
    assert SnapshotStore(out / "lost", keep=1, fence=None).steps() == [2]


def test_a_disk_that_hangs_on_one_rank_costs_snapshots_until_it_is_back_and_never_training(out: Path) -> None:
    first, second = (seen(out, "the_disk_of_one_rank_hangs", 2, rank) for rank in (0, 1))
    assert [(step, result) for step, result, _ in first["events"]] == [
        (2, "failed"),
        (4, "failed"),
        (6, "failed"),
        (8, "saved"),
        (9, "saved"),
    ]
    busy = "rank 1: its part of the snapshot before is still not written after"
    assert [busy in message for _, _, message in first["events"][1:3]] == [True, True]
    assert second["seconds"] < 5, "nothing waits for the disk on the thread that trains"
    assert second["intact"] == [True], "what is being written is not copied over"
    assert first["saved"] == second["saved"] == [True, True]
    assert SnapshotStore(out / "hung", keep=1, fence=None).verify(8).step == 8


def test_what_a_save_is_expected_to_write_is_what_all_ranks_write_together(out: Path) -> None:
    manifest = SnapshotStore(out / "lopsided", keep=1, fence=None).verify(2)
    first, second = (seen(out, "rank_0_writes_most", 2, rank) for rank in (0, 1))
    before_it_is_written = manifest.total_bytes - manifest.files["state.json"].bytes
    assert first == {"expected": [manifest.total_bytes], "in_flight": before_it_is_written}
    shards = sum(entry.bytes for name, entry in manifest.files.items() if name.startswith("shards/"))
    assert second == {"expected": [], "in_flight": shards}


def test_a_snapshot_that_took_too_long_for_the_other_ranks_is_saved_all_the_same(out: Path) -> None:
    (event,) = seen(out, "rank_0_takes_long", 2)
    assert event[:2] == [2, "saved"], event
    assert SnapshotStore(out / "slow", keep=1, fence=None).verify(2).step == 2


def test_the_writing_threads_of_all_ranks_stay_together_while_rank_0_reads_what_they_wrote(out: Path) -> None:
    """A group that is lost is never taken apart: each has threads and connections."""
    found = [seen(out, "rank_0_reads_for_long", 2, rank) for rank in (0, 1)]
    assert [(one["is_lost"], one["same_group"]) for one in found] == [(False, True)] * 2
    assert found[0]["events"] == ["saved", "saved"]


def test_a_pipeline_gets_its_stages_back_each_on_its_rank(out: Path) -> None:
    assert [seen(out, "pipeline", 2, rank) for rank in (0, 1)] == [[0.5] * 3, [1.5] * 3]


def test_a_whole_tensor_comes_back_in_the_size_that_it_was_saved_in(out: Path) -> None:
    assert [seen(out, "pipeline_grown", 2, rank) for rank in (0, 1)] == [[0.5] * 3, [1.5] * 3]


def test_a_tensor_of_another_type_is_refused_on_all_ranks_and_not_converted(out: Path) -> None:
    for rank in (0, 1):
        kind, message = seen(out, "pipeline_retyped", 2, rank)
        assert kind == "IncompatibleSnapshotError"
        assert "layer0.weight is torch.float32 in it and torch.int64 in the program" in message


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_volume_that_gives_one_rank_no_index_is_no_snapshot_that_does_not_fit(out: Path, fault: str) -> None:
    for rank in (0, 1):
        assert seen(out, fault, 2, rank) == ["SnapshotError", "rank 1: [Errno 5] Input/output error"]


def test_a_model_with_another_layer_is_refused_by_name(out: Path) -> None:
    for rank in (0, 1):
        kind, message = seen(out, "another_layer", 2, rank)
        assert kind == "IncompatibleSnapshotError"
        assert "does not fit this program. Run the one that wrote it" in message
        assert "3.weight" in message


def test_a_gpu_that_fails_in_a_load_is_blamed_on_its_own_rank_alone(out: Path) -> None:
    first, second = (seen(out, "the_gpu_of_one_rank_fails", 2, rank) for rank in (0, 1))
    assert first[0] == "PeerLost"
    assert "rank 1 could not load its part" in first[1]
    assert second == ["WorkerException", "CUDA error: uncorrectable ECC error encountered"]


def test_stages_are_not_resumed_by_another_number_of_ranks(out: Path) -> None:
    kind, message = seen(out, "pipeline_resized", 1)
    assert kind == "IncompatibleSnapshotError"
    assert "resume it with 2 ranks, not 1" in message


def test_a_model_in_parts_is_exported_whole(out: Path, tmp_path: Path) -> None:
    assert main(["export", str(out / "fsdp"), "--step", "4", "--to", str(tmp_path)]) == 0
    exported = load_file(tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(), torch.nn.Linear(7, 3))
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    values = [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
    assert values == seen(out, "save", 2)["at_save"][0]
    assert all(torch.equal(exported[name], tensor) for name, tensor in model.state_dict().items())


def test_a_pipeline_is_exported_with_all_its_stages(out: Path, tmp_path: Path) -> None:
    assert main(["export", str(out / "pipeline"), "--to", str(tmp_path)]) == 0
    exported = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in exported.items()} == {
        "layer0.weight": [0.5] * 3,
        "layer1.weight": [1.5] * 3,
    }


def test_a_flipped_bit_in_one_part_is_seen_by_rank_0(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out / "fsdp", tmp_path / "fsdp")
    part = tmp_path / "fsdp" / "step-000000000004" / "shards" / "rank-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert main(["verify", str(tmp_path / "fsdp"), "--step", "4"]) == 1
    assert main(["verify", str(tmp_path / "fsdp"), "--step", "2"]) == 0


def test_whole_tensors_are_the_first_ranks_and_shards_with_copies_are_spread() -> None:
    def shard(name: str) -> WriteItem:
        size = torch.Size([4])
        chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size)
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=size)
        return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    whole = [_create_write_item_for_tensor(name, torch.zeros(1)) for name in ("mean", "variance")]
    plan = SavePlan([*whole, shard("weight"), shard("bias")])
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan([plan, plan])
    first, second = ([item.index.fqn for item in plan.items] for plan in plans)
    assert first[:2] == ["mean", "variance"]
    assert sorted(first[2:] + second) == ["bias", "weight"]
    assert len(second) >= 1


def test_a_rank_at_another_world_size_reads_the_structure_of_one_rank_and_not_of_all_that_saved(tmp_path: Path) -> None:
    """Else the files that a resume reads grow with the square of the ranks."""
    text = json.dumps({"version": 1, "states": {"model": {}}}).encode()
    names = [f"shards/rank-{rank:05d}.json" for rank in range(1024)]
    entry = FileEntry(len(text), hashlib.sha256(text).hexdigest())
    numbers: dict[str, Any] = {"attempt": 0, "step": 1, "epoch": 0, "samples": 1, "global_batch": 1, "time": 0.0}
    saved = Manifest(job="digits", uid="uid", world_size=1024, strategy="fsdp", **numbers)
    (tmp_path / "shards").mkdir()
    (tmp_path / names[0]).write_bytes(text)  # there is no other
    alike = saved.with_files(dict.fromkeys(names, entry))
    assert _read_structure(tmp_path, alike, Ranks(0, 1)) == {"model": {}}
    stages = alike.with_files({**alike.files, names[-1]: replace(entry, sha256="0" * 64)})
    with pytest.raises(IncompatibleSnapshotError, match="1024 ranks hold different parts of the model"):
        _read_structure(tmp_path, stages, Ranks(0, 1))


class Counted(list[dict[str, Any]]):
    """Counts how often it is gone through."""

    asked = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.asked += 1
        return super().__iter__()


def test_the_parts_of_a_whole_model_are_gone_through_once_and_not_for_each_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [shard_storage.tensor_file(rank) for rank in range(64)]
    parts = Counted(
        {"offsets": [rank], "sizes": [1], "file": file, "key": "weight@"} for rank, file in enumerate(files)
    )
    index = {"weight": {"dtype": "F32", "shape": [64], "parts": parts}}
    monkeypatch.setattr(shard_storage, "_read_index", lambda *_: index)
    monkeypatch.setattr(
        shard_storage, "read_tensors", lambda _, __, file: {"weight@": torch.tensor([float(files.index(file))])}
    )
    whole = shard_storage.read_whole(tmp_path, cast(Any, None))
    assert whole["weight"].tolist() == [float(rank) for rank in range(64)]
    assert parts.asked == 1
