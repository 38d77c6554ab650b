"""Runs the blocks of docs/trainer.md in one folder, as a person would who pastes them in order.

Commands are run by bash, with `python`, `torchrun` and `ddpjob` of this environment first on the path. Training runs
that end well, or are refused before they start, share one start of torchrun for each number of ranks (`in_one_group`).
What a block is about stands in its first line:

    exits=N       it ends with that exit code, not 0
    needs=gpus    at least two CUDA devices; needs=wandb, no-wandb: that package there, or not
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.support.ports import free_port
from tests.trainer.documented import ROOT, Block, blocks
from tests.trainer.forked import start as forked

HERE = Path(__file__).parent
DEADLINE = 420
_RUN = re.compile(
    r"(?P<environment>(?:[A-Z_]+=\S+ )*)(?:torchrun --nproc-per-node (?P<ranks>\d+)|python) "
    r"-m ddp_trainer\.train (?P<arguments>.*)"
)


@dataclass(frozen=True)
class Run:
    """One command that trains; `ranks` is 0 for the trainer without torchrun."""

    ranks: int
    environment: dict[str, str]
    arguments: list[str]


@dataclass
class Example:
    """A `sh` block, and the lines of output that the page shows after it."""

    name: str
    block: Block
    shown: list[str]
    runs: list[Run]
    rest: str
    code: int | None = None
    output: str = ""

    @property
    def exits(self) -> int:
        return int(self.block.attributes.get("exits", "0"))

    @property
    def lacks(self) -> str | None:
        """What this machine has not got that the example needs."""
        needs = self.block.attributes.get("needs")
        if needs == "gpus" and torch.cuda.device_count() < 2:
            return "two CUDA devices"
        if needs in ("wandb", "no-wandb") and (importlib.util.find_spec("wandb") is None) == (needs == "wandb"):
            return "the package wandb" if needs == "wandb" else "a Python without wandb"
        return None


def examples() -> list[Example]:
    """Every `sh` block of the page."""
    found: list[Example] = []
    page = blocks()
    for number, block in enumerate(page):
        if block.language != "sh":
            continue
        following = page[number + 1] if number + 1 < len(page) else None
        shown = following.text.splitlines() if following and following.language == "text" else []
        runs, rest = _split(block)
        count = sum(other.block.heading == block.heading for other in found)
        found.append(Example(f"{block.heading}{f' {count + 1}' if count else ''}", block, shown, runs, rest))
    return found


def _split(block: Block) -> tuple[list[Run], str]:
    """The commands at the block's beginning that only train, and what is left for bash."""
    commands = block.text.replace("\\\n", " ").splitlines()
    runs = []
    local_module = block.attributes.get("exits") == "1" or block.attributes.get("needs") == "gpus"
    while commands and not local_module:
        match = _RUN.fullmatch(" ".join(commands[0].split()))
        if match is None:
            break
        environment = dict(pair.split("=", 1) for pair in match["environment"].split())
        runs.append(Run(int(match["ranks"] or 0), environment, shlex.split(match["arguments"])))
        commands = commands[1:]
    return runs, "\n".join(commands)


@dataclass
class Workbook:
    """A folder in which the page is worked through."""

    folder: Path
    examples: list[Example] = field(default_factory=examples)

    def work_through(self) -> None:
        """Run everything that this machine can run."""
        self._write_files()
        self.put_commands_on_path()
        here = [example for example in self.examples if example.lacks is None]
        for example in here:
            if example.exits == 1:
                self.run_in_bash(example)
        for ranks in sorted({run.ranks for example in here for run in example.runs}):
            self._train_together(ranks, here)
        for example in here:
            if example.exits != 1 and example.rest.strip():
                self.run_in_bash(example)

    def _write_files(self) -> None:
        for block in blocks():
            name = re.match(r"# (\S+\.(?:py|yaml|toml))\n", block.text)
            if block.language in ("python", "yaml", "toml") and name:
                (self.folder / name[1]).write_text(block.text)
        self._install()

    def _install(self) -> None:
        """Leave what pip leaves of the package's entry points."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        installed = self.folder / "example-1.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in project["entry-points"].items()
        ]
        (installed / "entry_points.txt").write_text("\n".join(lines))

    def put_commands_on_path(self) -> None:
        """Each has its process forked with torch imported; torchrun starts `python` for its ranks (PYTHON_EXEC)."""
        (self.folder / "bin").mkdir()
        modules = {"python": "", "torchrun": " -m torch.distributed.run", "ddpjob": " -m ddpjob_operator.cli.main"}
        for name, module in modules.items():
            command = self.folder / "bin" / name
            # what torchrun puts before a program; and an agent of `ddpjob run` has ranks that are its own children
            first = "unset PYTHON_EXEC" if name == "ddpjob" else '[ "$1" = -u ] && shift'
            command.write_text(f'#!/bin/sh\n{first}\nexec {shlex.join(forked.command(0))}{module} "$@"\n')
            command.chmod(0o755)

    @property
    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_")}
        return {
            **inherited,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'trainer_image'}:{ROOT / 'operator'}:{self.folder}",
            "PYTHON_EXEC": str(self.folder / "bin" / "python"),
            "OMP_NUM_THREADS": "1",
        }

    def run_in_bash(self, example: Example) -> None:
        text = example.rest.replace("29511", str(free_port()))
        # two ranks of an example that asks for none may not both have a GPU here
        visible = {} if example.block.attributes.get("needs") == "gpus" else {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment | visible,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        example.code = done.returncode
        example.output += done.stdout

    def _train_together(self, ranks: int, wanted: list[Example]) -> None:
        pairs = [(example, run) for example in wanted for run in example.runs if run.ranks == ranks]
        asked, answered = self.folder / f"asked-{ranks}.json", self.folder / f"answered-{ranks}.json"
        asked.write_text(json.dumps([{"environment": run.environment, "arguments": run.arguments} for _, run in pairs]))
        done = subprocess.run(
            forked.command(ranks, str(HERE / "in_one_group.py"), str(asked), str(answered)),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        results = json.loads(answered.read_text()) if answered.exists() else []
        for number, (example, _) in enumerate(pairs):
            if number < len(results):
                example.code = max(example.code or 0, results[number]["code"])
                example.output += results[number]["output"]
            else:
                example.output += f"did not come to its end:\n{done.stdout}{done.stderr}"
                example.code = -1
