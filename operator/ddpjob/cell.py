"""A function of a notebook cell, as a module of its own that the ranks can import.

IPython keeps the source of each cell in `linecache`, where `inspect` finds it. What else the cell and the notebook
define is not sent: a function that uses it is refused here, not on the cluster.
"""

from __future__ import annotations

import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

MODULE = "ddpjob_cell"
_EVERY_MODULE_HAS = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__loader__", "__package__"}
_OF_IPYTHON = {"display", "get_ipython"}
"""Which it puts among the builtins of its process; what a line with a magic becomes calls `get_ipython`."""


def source_of(function: Callable[..., Any]) -> str | None:
    """The module with this function alone; None where its source is not known, as in Python's own prompt.

    Raises:
        ValueError: the function uses what is not sent with it. The message names it, and says what to do.
    """
    try:
        given = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    # annotations are not evaluated: they may name what only the notebook has imported
    source = f"from __future__ import annotations\n\n{textwrap.dedent(given)}"
    if missing := sorted(set(_free(symtable.symtable(source, MODULE, "exec")))):
        raise ValueError(
            f"{function.__name__} uses {', '.join(missing)} of the notebook, which is not sent with it; import and "
            "define in the function what it needs, pass it in kwargs, or write both into a file of the folder"
        )
    return source


def _free(module: symtable.SymbolTable) -> Iterator[str]:
    """Names that the source reads, and nothing in it defines."""
    symbols = [
        (symbol, table is module or symbol.is_global())
        for table in _with_inner(module)
        for symbol in table.get_symbols()
    ]
    known = {symbol.get_name() for symbol, is_global in symbols if is_global and _is_defined(symbol)}
    known |= _EVERY_MODULE_HAS | (set(dir(builtins)) - _OF_IPYTHON)
    for symbol, is_global in symbols:
        if is_global and symbol.is_referenced() and symbol.get_name() not in known:
            yield symbol.get_name()


def _is_defined(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _with_inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        if "annotation" not in inner.get_type():  # a scope of its own since Python 3.14
            yield from _with_inner(inner)
