"""What a state_dict holds besides tensors, as JSON: nothing in a snapshot is ever unpickled, so nothing in it can
run.

A value is written as itself where JSON has it, and as an object with one `$` key where it has not. Tensors leave a
reference behind and go to a safetensors file under their path in the state, so that `model.safetensors` has the names
of the model's own state_dict.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.snapshots.trust.errors import IncompatibleSnapshotError, SnapshotError

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class Deferred:
    """A value of a state_dict that the writing thread computes: JSON that training neither waits for nor changes."""

    value: Callable[[], Any]


def encode(value: Any, path: str, tensors: dict[str, Tensor], *, sharded: bool = False) -> Any:
    """`value` as JSON; its tensors are added to `tensors`. `path` names it in errors and is the prefix of their names.
    With `sharded`, tensors may be DTensors, of which this rank holds a part. A `Deferred` stays as it is.

    Raises SnapshotError naming the path of a value that can be neither.
    """
    match value:
        case None | bool() | str():
            return value
        case Deferred() if not sharded:
            return value
        case np.generic() if not isinstance(value.item(), np.generic):  # Python has none for a longdouble
            return encode(value.item(), path, tensors, sharded=sharded)
        case int():
            return int(value)
        case float():
            return float(value)
        case Tensor():
            if type(value) not in _PLAIN and not (sharded and _is_dtensor(value)):
                raise _refused(
                    path, value, "save its state with a strategy that knows it, or convert it to a plain tensor"
                )
            return {"$tensor": _add(path, value.detach(), tensors)}
        case np.ndarray():
            return {"$array": _add(path, torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), tensors)}
        case list():
            return [encode(item, _join(path, index), tensors, sharded=sharded) for index, item in enumerate(value)]
        case tuple():
            return {
                "$tuple": [
                    encode(item, _join(path, index), tensors, sharded=sharded) for index, item in enumerate(value)
                ]
            }
        case set() | frozenset():
            tag = "$frozenset" if isinstance(value, frozenset) else "$set"
            return {tag: [encode(item, path, tensors, sharded=sharded) for item in sorted(value, key=repr)]}
        case Counter():
            return {"$counter": _pairs(value, path, tensors, sharded)}
        case OrderedDict():
            ordered = {"$ordered": _pairs(value, path, tensors, sharded)}
            # nn.Module keeps the versions of its modules' formats here.
            metadata = getattr(value, "_metadata", None)
            return ordered if metadata is None else {**ordered, "metadata": encode(metadata, f"{path}._metadata", {})}
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: encode(item, _join(path, key), tensors, sharded=sharded) for key, item in value.items()}
            return {"$dict": _pairs(value, path, tensors, sharded)}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case complex():
            return {"$complex": [value.real, value.imag]}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"$device": str(value)}
    raise _refused(path, value, "return only tensors, numbers, text, lists and dicts from state_dict()")


def to_json(structure: Any) -> bytes:
    """The bytes of what `encode` made, deferred values included. For the thread that writes."""
    return json.dumps(structure, default=_now).encode()


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`. Raises IncompatibleSnapshotError for what this version does not know."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$array": str(name)}:
            return tensors[name].numpy()
        case {"$tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"$set": list(items)}:
            return {decode(item, tensors) for item in items}
        case {"$frozenset": list(items)}:
            return frozenset(decode(item, tensors) for item in items)
        case {"$counter": list(pairs)}:
            return Counter(_from_pairs(pairs, tensors))
        case {"$ordered": list(pairs)}:
            ordered: Any = OrderedDict(_from_pairs(pairs, tensors))
            if "metadata" in value:
                ordered._metadata = decode(value["metadata"], {})
            return ordered
        case {"$dict": list(pairs)}:
            return _from_pairs(pairs, tensors)
        case {"$bytes": str(text)}:
            return base64.b64decode(text)
        case {"$complex": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case {"$dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"$device": str(name)}:
            return torch.device(name)
    unknown = [key for key in value if key.startswith("$")]
    if unknown:
        raise IncompatibleSnapshotError(
            f"its state holds a {unknown[0][1:]}, which this image does not know: use a newer one"
        )
    return {key: decode(item, tensors) for key, item in value.items()}


def _now(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.value()
    raise TypeError(f"a {type(value).__qualname__} was not encoded")


def _is_dtensor(value: Tensor) -> bool:
    # Imported here: it takes seconds, and most programs have none.
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _pairs(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], sharded: bool) -> list[list[Any]]:
    return [[_key(key, path), encode(item, _join(path, key), tensors, sharded=sharded)] for key, item in value.items()]


def _key(key: Any, path: str) -> Any:
    tensors: dict[str, Tensor] = {}
    encoded = encode(key, path, tensors)
    if tensors:
        what = "name them, or number them as torch.optim.Optimizer.state_dict() does; one that is read is another key"
        raise _refused(f"a key of {path or 'the state'}", key, what)
    return encoded


def _from_pairs(pairs: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, {}): decode(item, tensors) for key, item in pairs}


def _add(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    # {"a.b": …} and {"a": {"b": …}} have the same path; the second gets another name.
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _refused(path: str, value: object, advice: str) -> SnapshotError:
    return SnapshotError(
        f"{path or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, "
        f"which a snapshot cannot hold: {advice}"
    )
