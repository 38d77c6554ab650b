"""What goes into a snapshot comes out bit for bit, and nothing in it is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots.codec import rng
from ddp_trainer.snapshots.codec.state import File, Staging, file_in_memory, parse_files, read_files
from ddp_trainer.snapshots.codec.tensorfile import TensorFile, lay_out
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest


def in_memory(name: str, data: bytes) -> File:
    """The file as reading leaves it."""
    file = file_in_memory(name, len(data))
    rest = memoryview(data)
    for piece in file.pieces():
        piece[:], rest = rest[: len(piece)], rest[len(piece) :]
    assert not rest
    return file


def parse(data: bytes) -> dict[str, torch.Tensor]:
    file = in_memory("x.safetensors", data)
    assert isinstance(file, TensorFile)
    return file.tensors()


def files_of(states: dict[str, Any]) -> dict[str, File]:
    staged = Staging().stage(states)
    files = {name: header + data.numpy().tobytes() for name, (header, data) in staged.files.items()}
    files["state.json"] = staged.structure
    return {name: in_memory(name, data) for name, data in files.items()}


def there_and_back(state: Any) -> Any:
    return parse_files(files_of({"x": state}))["x"]


TENSORS = {
    "float64": torch.tensor([0.1, float("nan"), float("-inf"), -0.0], dtype=torch.float64),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "float16": torch.randn(7).half(),
    "int8": torch.arange(-3, 4, dtype=torch.int8),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "float8": torch.randn(9).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(20)[::3],
    "expanded": torch.tensor([1.0]).expand(4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_comes_back_bit_for_bit(name: str) -> None:
    tensor = TENSORS[name]
    back = there_and_back({"a": tensor})["a"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes(back.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 1 << 80, 0.1, 1e-320, float("inf"), "text", "ü\0", [], [1, [2, "3"]], (1, (2,)), {},
        {"a": {"b": 1}},
        {1: "a", 2: {3: "b"}}, {"$tensor": "looks like ours"}, {("a", 1): 2}, {True: 1, None: 2}, {1, 2, 3},
        frozenset([1, 2]), {frozenset([1, 2]): 3}, {frozenset([1]), frozenset([frozenset([2])])},
        b"\x00\xff", 1 - 2j,
        Counter([3, 3, 5]), OrderedDict([("b", 1), ("a", 2)]), torch.float16, torch.device("cuda:1"),
    ],
    ids=repr,
)  # fmt: skip
def test_any_plain_value_comes_back_as_it_was(value: Any) -> None:
    back = there_and_back({"value": value})["value"]
    assert back == value
    assert type(back) is type(value)


def test_nan_and_numpy_values_come_back() -> None:
    back = there_and_back(
        {"nan": float("nan"), "scalar": np.float64(0.1), "array": np.arange(6).reshape(2, 3), "count": np.int64(7)}
    )
    assert back["nan"] != back["nan"]
    assert back["scalar"] == 0.1
    assert back["count"] == 7
    np.testing.assert_array_equal(back["array"], np.arange(6).reshape(2, 3))


class Opaque:
    """What only a pickle could hold."""


@pytest.mark.parametrize(
    "value",
    [Opaque(), lambda: None, Opaque, torch.Generator(), np.longdouble(1)],
    ids=["object", "function", "class", "generator", "longdouble"],
)
def test_what_a_snapshot_cannot_hold_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(SnapshotError, match=r"groups\.0\.hook is a .* return only tensors"):
        there_and_back({"groups": [{"hook": value}]})


@pytest.mark.parametrize("key", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), (torch.ones(2), 1)], ids=repr)
def test_a_tensor_as_a_key_is_refused_since_it_could_not_be_read_again(key: Any) -> None:
    """As in the state of wrappers such as Lookahead of pytorch_optimizer: each save succeeded, and no attempt could
    resume.
    """
    with pytest.raises(SnapshotError, match=r"a key of slow is a .*name them, or number them"):
        there_and_back({"slow": {key: torch.zeros(2)}})


def test_a_tensor_subclass_is_not_saved_as_less_than_it_is() -> None:
    class Sharded(torch.Tensor):
        pass

    with pytest.raises(SnapshotError, match=r"weight is a .*Sharded"):
        there_and_back({"weight": torch.ones(2).as_subclass(Sharded)})


def test_two_paths_with_one_name_are_told_apart() -> None:
    back = there_and_back({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1, 2)


def test_model_file_is_what_other_programs_read_as_safetensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    Staging().stage({"model": model.state_dict()}).write(tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_files_that_other_programs_write_as_safetensors_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"b": torch.randn(3, 2), "a": torch.arange(3)}, tmp_path / "x", metadata={"format": "pt"}
    )
    ours = parse((tmp_path / "x").read_bytes())
    theirs = safetensors.torch.load_file(tmp_path / "x")
    assert all(torch.equal(ours[name], theirs[name]) for name in ("a", "b"))


@pytest.mark.parametrize(
    "file",
    [
        b"", b"\x01", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{{",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}      ' + b"1234",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}     ',
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"PY","shape":[1],"data_offsets":[0,4]}}       ' + b"1234",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}      ' + b"12345678",
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + b"12345678",
        (100).to_bytes(8, "little")
        + b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'.ljust(100)
        + b"123456",
        (99_000_000).to_bytes(8, "little") + b"{}",
    ],
)  # fmt: skip
def test_a_malformed_tensor_file_is_refused(file: bytes) -> None:
    with pytest.raises(IncompatibleSnapshotError):
        parse(file)


def test_a_bit_flipped_in_a_header_is_a_corrupt_file_and_not_one_of_another_program(volume: Any) -> None:
    store = volume.writer()
    states = {"model": {"w": torch.randn(1000), "b": torch.randn(3)}}
    manifest = store.save(
        lambda directory: Staging().stage(states).write(directory),
        Manifest("digits", "uid-1", 0, 1, 0, 0, 1, "ddp", 8, 1.0),
    )
    path = volume.step(1) / "model.safetensors"
    data = path.read_bytes()
    for position in (0, 7, 8, 30, 60, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(CorruptSnapshotError, match="SHA-256"):
            read_files(volume.step(1), manifest)
    path.write_bytes(data)
    assert torch.equal(parse_files(read_files(volume.step(1), manifest))["model"]["w"], states["model"]["w"])


def test_each_tensor_that_is_read_has_aligned_memory_of_its_own() -> None:
    back = there_and_back({"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(5), "c": torch.ones(5)})
    assert all(tensor.data_ptr() % 64 == 0 and tensor.storage_offset() == 0 for tensor in back.values())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in back.values())


def test_every_tensor_lies_at_a_multiple_of_its_element_size() -> None:
    layout = lay_out(
        {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    )
    assert all(slot.begin % slot.dtype.itemsize == 0 for slot in layout.slots.values())
    assert len(layout.header) % 8 == 0


def test_buffers_are_reused_from_save_to_save_and_hold_the_newest_values() -> None:
    staging = Staging()
    tensor = torch.zeros(1000)
    first = staging.stage({"model": {"w": tensor}}).files["model.safetensors"][1]
    tensor.fill_(1)
    assert first.sum() == 0, "staging must copy"
    second = staging.stage({"model": {"w": tensor}}).files["model.safetensors"][1]
    assert second.data_ptr() == first.data_ptr()
    assert second.view(torch.float32).sum() == 1000


class Copies(TorchDispatchMode):
    """Notes which copies may still be under way when the call for them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.are_non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.are_non_blocking.append(bool(args[2]) if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_only_copies_that_are_waited_for_may_be_under_way_when_staged() -> None:
    """Those from CUDA are; the one here is of any other device."""
    with Copies() as copies:
        Staging().stage({"model": {"w": torch.ones(3)}})
    assert copies.are_non_blocking == [False]


def test_a_new_tensor_gets_a_new_buffer() -> None:
    staging = Staging()
    staging.stage({"model": {"w": torch.zeros(10)}})
    staged = staging.stage({"model": {"w": torch.ones(20), "v": torch.ones(2, dtype=torch.int64)}})
    assert staged.files["model.safetensors"][1].numel() == 96


class Bomb:
    """Unpickling this creates the file it names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.fault(47)
def test_a_malicious_pickle_in_a_snapshot_is_never_executed(volume: Any, tmp_path: Path) -> None:
    evil = pickle.dumps(Bomb(tmp_path / "executed"))
    store = volume.writer()

    def write(directory: Path) -> dict[str, FileEntry]:
        names = ("model.safetensors", "optimizer.pt", "state.json")
        return {name: store.disk.create(directory / name, [evil]) for name in names}

    manifest = store.save(write, Manifest("digits", "uid-1", 0, 1, 0, 0, 1, "ddp", 8, 1.0))
    with pytest.raises(IncompatibleSnapshotError):
        parse_files(read_files(volume.step(1), manifest))
    with pytest.raises(IncompatibleSnapshotError):
        parse(evil)
    assert not (tmp_path / "executed").exists()
    pickle.loads(evil)
    assert (tmp_path / "executed").exists(), "the bomb itself must work, or this test shows nothing"


def test_a_kind_of_value_that_this_image_does_not_know_is_refused() -> None:
    files = files_of({"x": {}})
    structure = {"version": 1, "states": {"x": {"$quaternion": [1, 2]}}}
    files["state.json"] = in_memory("state.json", json.dumps(structure).encode())
    with pytest.raises(IncompatibleSnapshotError, match="quaternion"):
        parse_files(files)


# Random numbers


def draw() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn()


def test_all_generators_go_on_where_they_were() -> None:
    draw()  # leaves the cached second value of gauss and randn behind
    state = rng.capture()
    expected = draw(), draw()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    rng.restore(state)
    assert (draw(), draw()) == expected


def test_a_capture_has_the_same_length_whatever_the_generators_hold() -> None:
    random.seed(1)
    first = rng.capture()
    random.gauss(0, 1), np.random.randn(), torch.rand(1)
    assert rng.capture().shape == first.shape


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: torch.rand(1),
        lambda: torch.manual_seed(1),
        lambda: np.random.rand(),
        lambda: np.random.randn(),
        lambda: np.random.seed(1),
        lambda: np.random.set_state(np.random.RandomState(2).get_state()),
        lambda: random.random(),
        lambda: random.gauss(0, 1),
        lambda: random.seed(1),
    ],
)
def test_captures_are_one_tensor_until_something_is_drawn(drawn: Callable[[], Any]) -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    captures = rng.Captures()
    for _ in range(3):  # the second normal number of a pair is drawn differently from the first
        before = captures.capture()
        assert captures.capture() is before or np.random.get_state(legacy=False)["has_gauss"]
        assert torch.equal(before, rng.capture())
        drawn()
        after = captures.capture()
        assert torch.equal(after, rng.capture())
        assert torch.equal(before, after) or after is not before


def test_a_generator_of_numpy_that_a_snapshot_cannot_hold_is_named() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        for capture in (rng.capture, rng.Captures().capture):
            with pytest.raises(UserError, match=r"np.random draws from PCG64 .* leave that call out"):
                capture()
    finally:
        np.random.set_bit_generator(before)


def test_reseeding_is_repeatable_and_differs_by_rank_step_and_size() -> None:
    state = rng.capture()

    def drawn(**where: int) -> Any:
        rng.reseed(state, **where)
        return draw()

    first = drawn(step=5, rank=0, world_size=2)
    assert drawn(step=5, rank=0, world_size=2) == first
    others = [
        drawn(step=5, rank=1, world_size=2),
        drawn(step=6, rank=0, world_size=2),
        drawn(step=5, rank=0, world_size=3),
    ]
    assert first not in others


def test_a_garbled_generator_state_is_refused() -> None:
    with pytest.raises(IncompatibleSnapshotError):
        rng.restore(torch.zeros(100, dtype=torch.uint8))
