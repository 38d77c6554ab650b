"""docs/correctness.md: the tables of all proofs, written from figures that are kept beside it and from nothing else.

`correctness.json` holds what was measured: every loss, not its rounded form in a table. The document is a pure
function of it and of the text at the head of each proof, so neither can be edited apart from the other; a test
writes it again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Final

from pydantic import TypeAdapter
from tests.prove import agreement, bitwise_resume, elastic, published_run
from tests.prove.tables import markdown
from tests.trainer.train.volume import ROOT

DOCUMENT: Final = ROOT / "docs" / "correctness.md"
FIGURES: Final = DOCUMENT.with_suffix(".json")

PROOFS: Final[Mapping[str, ModuleType]] = {
    "agreement": agreement,
    "published_run": published_run,
    "bitwise_resume": bitwise_resume,
    "elastic": elastic,
}
"""Each measures rows (`measure`), finds what is wrong in them (`violations`), and lays them out (`tables`)."""


AgreementRows = tuple[agreement.Run, ...]
PublishedRows = tuple[published_run.Run, ...]
ResumeRows = tuple[bitwise_resume.Resume, ...]
ElasticRows = tuple[elastic.Row, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What `make prove` measured, by the names of PROOFS, and with which torch."""

    torch: str
    agreement: AgreementRows
    published_run: PublishedRows
    bitwise_resume: ResumeRows
    elastic: ElasticRows

    def of(self, proof: str) -> Sequence[Any]:
        rows: Sequence[Any] = getattr(self, proof)
        return rows


def render(figures: Figures) -> str:
    """The document."""
    parts = [
        "# Correctness\n",
        "Numerical guarantees of the trainer, with the measurements. `make prove` repeats every run below with real "
        "ranks under torchrun and fails if a value exceeds its limit; `python -m tests.prove --write` also writes "
        "this page. `make test` checks that the page agrees with [correctness.json](correctness.json), that every "
        "value is within its limit, and repeats a short form of each run.\n",
        f"PyTorch {figures.torch}, gloo on CPU, one thread per rank.\n",
    ]
    for name, proof in PROOFS.items():
        title, text = heading(proof)
        parts += [f"## {title}\n", f"{text}\n", *map(markdown, proof.tables(figures.of(name)))]
        parts.append(f"Source: [tests/prove/{name}.py](../tests/prove/{name}.py).\n")
    return "\n".join(parts)


def heading(proof: ModuleType) -> tuple[str, str]:
    """The title and the text of a proof, which stand at the head of its module."""
    first, _, rest = (proof.__doc__ or "").strip().partition("\n\n")
    title, _, claim = first.partition(": ")
    return title, f"**{claim[0].upper()}{claim[1:]}**\n\n{rest}"


def read() -> Figures:
    """The figures that are kept. Raises OSError, ValueError."""
    return TypeAdapter(Figures).validate_json(FIGURES.read_bytes())


def write(figures: Figures) -> None:
    """Keep the figures, a row a line, and write the document."""
    kept = asdict(figures)
    lines = [f' "torch": {json.dumps(kept["torch"])}']
    for name in PROOFS:
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in kept[name])
        lines.append(f' "{name}": [\n{rows}\n ]')
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    DOCUMENT.write_text(render(figures))
