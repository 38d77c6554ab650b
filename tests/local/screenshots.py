"""Takes the pictures of docs/dashboard.md from real runs: a Hugging Face script that lost a rank, a wrong script, and a
job that goes on.

python -m tests.local.screenshots
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from tests.support.browser import browser_program, new_tab
from tests.support.command import COMMAND
from tests.support.local_run import ROOT, environment, job_object

from ddpjob_operator.page.folder import FolderSource
from ddpjob_operator.page.server import serve

PICTURES = ROOT / "docs/pictures"
SHOTS = (
    ("dashboard-jobs", "/", 1280, "light", 480),
    ("dashboard-job", "/jobs/local/finetune", 1280, "light", 1290),
    ("dashboard-job-dark", "/jobs/local/finetune", 1280, "dark", 1290),
    ("dashboard-phone", "/jobs/local/finetune", 390, "dark", 1000),
    ("dashboard-failure", "/jobs/local/mistyped", 1280, "light", 760),
)
"""Name, page, width, colours, and height; None is all of it."""
ALL = tuple(
    (
        f"{page.replace('/', '-') or 'jobs'}-{width}-{scheme}",
        f"/jobs/local/{page}" if page else "/",
        width,
        scheme,
        None,
    )
    for page in ("", "finetune", "mistyped", "longer", "longer/logs")
    for width in (1280, 390)
    for scheme in ("light", "dark")
)
"""Every page in every form, for those who change the pages: `--all DIR`."""


async def main() -> int:
    program = browser_program()
    if program is None:
        print("there is no Chromium; `make tools` installs Debian's", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shots, target = (ALL, Path(sys.argv[2])) if sys.argv[1:2] == ["--all"] else (SHOTS, PICTURES)
        target.mkdir(parents=True, exist_ok=True)
        for name, status in (("finetune", 0), ("mistyped", 1)):
            assert await (await started(work, name)).wait() == status, name
        longest = await started(work, "longer")
        runner, url = await serve(Pictured.at(work / "shared"), "127.0.0.1", 0)
        async with new_tab(program, work / "profile") as tab:
            await tab.open(url)
            await tab.until("#jobs", lambda text: "of 9,200" in text, "it trains")
            for name, path, width, scheme, height in shots:
                await tab.open(url.rstrip("/") + path, width, scheme)
                (target / f"{name}.png").write_bytes(await tab.screenshot(height))
                print(target / f"{name}.png")
        await runner.cleanup()
        longest.send_signal(signal.SIGINT)
        assert await longest.wait() == 130
    return 0


class Pictured(FolderSource):
    """A folder with a name that means something to those who see the picture."""

    @property
    def where(self) -> str:
        return "~/finetune/shared"


async def started(work: Path, name: str) -> asyncio.subprocess.Process:
    """`ddpjob run`: a script that loses a rank, one that cannot be imported, or a job that takes long."""
    spec: dict[str, Any] = {"nodes": 2, "args": ["--task", "digits", "--epochs", "400"]}
    if name == "finetune":
        shutil.copy(ROOT / "tests/fixtures/finetune.py", work)
        (work / "corpus.txt").write_text((ROOT / "docs/live-recovery.md").read_text())
        (work / ".ddpjobignore").write_text("shared\nprofile\n")
        script = {"code": {"path": "."}, "entrypoint": {"script": "finetune.py"}}
        spec = {"nodes": 2, "snapshots": {"every": "100steps"}} | script
    if name == "mistyped":
        (work / "shared/train.py").write_text("import torch\nimport trainsformers\n")
        spec = {"nodes": 2, "entrypoint": {"script": "/mnt/shared/train.py"}}
    (work / f"{name}.yaml").write_text(yaml.safe_dump(job_object(name, spec)))
    chaos = ["--chaos", "kill-rank@50%"] if name == "finetune" else []
    command = [*COMMAND, "run", f"{name}.yaml", *chaos]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return await asyncio.create_subprocess_exec(*command, cwd=work, env=environment(), **quiet)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
