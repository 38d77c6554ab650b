"""The table of settings in docs/trainer.md, made from the fields of TrainConfig, which are also what `--help` prints.

python -m tests.trainer.examples.settings    writes it
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing

from tests.trainer.documented import PAGE, ROOT

BEGIN, END = "<!-- settings: written by python -m tests.trainer.examples.settings -->\n", "<!-- end of settings -->"


def table() -> str:
    """The settings by heading, one row each."""
    from ddp_trainer.train.config import TrainConfig, flag

    hints = typing.get_type_hints(TrainConfig)
    rows = ["| Setting | Default | Meaning |", "|---|---|---|"]
    group = None
    for field in dataclasses.fields(TrainConfig):
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            rows.append(f"| **{group}** | | |")
        choices = ", ".join(f"`{choice}`" for choice in typing.get_args(hints[field.name]) if isinstance(choice, str))
        default = field.default if field.default is not dataclasses.MISSING else None
        shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        text = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| `{flag(field.name)}` | {shown} | {text}{f' ({choices})' if choices else ''} |")
    return "\n".join(rows) + "\n"


def on_page(page: str) -> str:
    """What stands between the two marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "trainer_image"))
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + table() + END, text, flags=re.S))
