"""No tensor is made on the default device: a script may have set it (`torch.set_default_device("cuda")`)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_trainer

PACKAGE = Path(ddp_trainer.__file__).parent
MAKERS = {
    "arange",
    "as_tensor",
    "empty",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
"""Functions of torch that the default device applies to (torch.utils._device), of those that are used at all."""
FILES = [path for path in PACKAGE.rglob("*.py") if "tasks" not in path.relative_to(PACKAGE).parts]


def without_device(source: str) -> list[str]:
    """Calls that make a tensor wherever the default device is."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_tensor_names_its_device(file: Path) -> None:
    assert without_device(file.read_text()) == []


def test_a_tensor_that_does_not_is_found() -> None:
    assert without_device("import torch\nx = [torch.zeros(3), torch.ones(2, device='cpu')]") == ["torch.zeros(3)"]
