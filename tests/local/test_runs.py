"""Whole jobs on this machine: `ddpjob run` from the file to the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.local.conftest import Started, held, let_go
from tests.support import forked_run
from tests.support.command import COMMAND
from tests.support.local_run import environment, job_object, new_job
from tests.support.processes import all_end
from tests.trainer.forked.start import RUNS, Forked

from ddp_trainer.logs.losses import read_losses
from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.local.volume import open_shared

pytestmark = pytest.mark.local

EPOCHS = 8
STEPS = 184
DIGITS = {
    "nodes": 2,
    "args": ["--task", "digits", "--epochs", str(EPOCHS)],
    "snapshots": {"every": "20steps"},
    "restart": {"backoff": {"initialSeconds": 0}},
}


@dataclass(frozen=True)
class Done:
    """What is left of a run."""

    status: DDPJobStatus
    shared: Path


def train(folder: Path, **spec: Any) -> Done:
    """Run the digits job, with `spec` over it, and keep its status."""
    shared = open_shared(folder)
    outcome = forked_run.outcome(new_job("digits", DIGITS | spec), shared)
    return Done(outcome.status, shared)


def train_and_kill(folder: Path, **spec: Any) -> Done:
    """The same with rank 1 killed in the middle."""
    shared = open_shared(folder)
    let_go(shared, attempt=1)
    job = new_job("digits", DIGITS | held(STEPS * 3 // 4, EPOCHS) | spec)
    outcome = forked_run.outcome(job, shared, chaos="kill-rank@50%")
    return Done(outcome.status, shared)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The job from its first step to its last, undisturbed."""
    return train(tmp_path_factory.mktemp("unbroken"))


PRINTS = """
import os, time
print("rank", os.environ["RANK"], "begins")
while not os.path.exists(os.path.join(os.environ["DDPJOB_SHARED"], "go")):
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), ["| rank 0 begins"]),
        (("--logs", "all"), ["| [node 0] rank 0 begins", "| [node 1] rank 1 begins"]),
        (("--logs", "none"), []),
    ],
    ids=["rank 0 by default", "all", "none"],
)
def test_what_ranks_print_is_shown_while_they_run(
    run_job: Any, tmp_path: Path, options: tuple[str, ...], shown: list[str]
) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    spec = {"nodes": 2, "entrypoint": {"script": str(tmp_path / "prints.py")}}
    run = run_job(spec, *options, name="prints")
    run.wait_for("Running: ")
    for line in shown:
        run.wait_for(line)
    (run.shared / "go").touch()
    assert run.end() == 0, run.text()
    assert sorted(line for line in run.text().splitlines() if "begins" in line) == shown
    assert "shared/logs/prints/pods/" in run.text()


def test_a_shell_script_of_a_file_is_shown_before_it_runs_and_gets_no_keys_of_the_shell(
    run_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    (tmp_path / "empty.py").touch()
    spec = {
        "initializers": [{"name": "code", "path": "code", "script": "mkdir -p code\nenv >code/environment"}],
        "entrypoint": {"script": str(tmp_path / "empty.py")},
    }
    run = run_job(spec, name="shell")
    assert run.end() == 0, run.text()
    before, begun, _ = run.text().partition("Initializing: ")
    assert begun
    assert "note: initializer code runs a shell script on this machine, as you: mkdir -p code … (2 lines)\n" in before
    (withheld,) = re.findall(r"note: not passed on from this shell: (.*); --env \S+ passes one on", before)
    assert "HF_TOKEN" in withheld.split(", ")
    assert "s3cret" not in (run.shared / "code" / "environment").read_text() + run.text()


def losses(shared: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_losses(shared / "logs" / "digits")]


def final_tensors(shared: Path) -> dict[str, bytes]:
    folder = shared / "checkpoints" / "digits" / f"step-{STEPS:012d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def assert_same_training(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    assert len(losses(one)) == STEPS
    assert final_tensors(one) == final_tensors(other)


def test_the_digits_job_succeeds(unbroken: Done) -> None:
    progress = unbroken.status.progress
    assert unbroken.status.phase is Phase.SUCCEEDED
    assert progress is not None
    assert (progress.step, progress.total_steps, unbroken.status.restarts) == (STEPS, STEPS, 0)
    assert progress.metrics is not None
    assert progress.metrics["eval_accuracy"] >= 0.95


@pytest.mark.fault(28, 40)
def test_a_killed_rank_costs_one_restart_and_not_one_bit(unbroken: Done, tmp_path: Path) -> None:
    killed = train_and_kill(tmp_path / "killed")
    failure = killed.status.last_failure
    assert (killed.status.phase, killed.status.restarts, killed.status.attempt) == (Phase.SUCCEEDED, 1, 1)
    assert failure is not None
    assert (failure.node_rank, failure.rank, failure.reason) == (1, 1, "WorkerKilled")
    assert failure.pod_name == "digits-0-1"
    assert "SIGKILL" in failure.message
    assert failure.step is not None
    assert STEPS / 2 <= failure.step < STEPS
    assert_same_training(killed.shared, unbroken.shared)


def test_a_killed_rank_in_place_leaves_the_other_nodes_pod_where_it_is(unbroken: Done, tmp_path: Path) -> None:
    restart = {"scope": "InPlace", "backoff": {"initialSeconds": 0}}
    killed = train_and_kill(tmp_path / "killed", restart=restart)
    failure = killed.status.last_failure
    assert (killed.status.phase, killed.status.restarts, killed.status.attempt) == (Phase.SUCCEEDED, 1, 1)
    assert failure is not None
    assert (failure.pod_name, failure.reason) == ("digits-0-1", "WorkerKilled")
    logs = killed.shared / "logs" / "digits" / "pods"
    assert sorted(log.stem for log in logs.iterdir()) == ["digits-0-0", "digits-0-1", "digits-1-1"]
    assert "this pod goes on as attempt 1, node rank 0 of 2" in (logs / "digits-0-0.log").read_text()
    assert_same_training(killed.shared, unbroken.shared)


def test_ctrl_c_saves_and_the_same_command_resumes(unbroken: Done, run_job: Any) -> None:
    spec = DIGITS | held(STEPS // 4, EPOCHS)
    first = run_job(spec)
    first.wait_for("loss")
    twin = run_job(spec)
    assert twin.end() == 2
    assert f"job digits is already running in {first.shared} (process {first.process.pid} on " in twin.text()

    processes = first.descendants()
    first.process.send_signal(signal.SIGINT)
    for pod in ("digits-0-0", "digits-0-1"):
        wait_for_log(first, "stopping: SIGTERM to 1 ranks", pod)
    let_go(first.shared)
    assert first.end() == 130, first.text()
    said = re.search(
        r"stopped at step (\d+); run the same command again to resume from step (\d+)$", first.text().strip()
    )
    assert said is not None, first.text()
    assert said[1] == said[2]
    assert 0 < int(said[2]) < STEPS
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []

    second = run_job(spec)
    assert second.end() == 0, second.text()
    assert f"resuming from step {said[2]}; --fresh begins anew" in second.text()
    assert re.search(
        rf"^Succeeded: {EPOCHS} epochs, {STEPS} steps, restarts 0, eval_accuracy 0\.9\d+", second.text(), re.M
    )
    assert "\x1b" not in second.text()
    assert [line["step"] for line in events(second.shared, "resumed")] == [int(said[2])]
    assert_same_training(second.shared, unbroken.shared)


def events(shared: Path, name: str) -> list[dict[str, Any]]:
    lines = (shared / "logs" / "digits" / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == name]


def script(tmp_path: Path, text: str) -> dict[str, Any]:
    """A spec that runs a script of one's own from the shared folder."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "train.py").write_text(text)
    return {"entrypoint": {"script": "/mnt/shared/train.py"}}


def test_a_run_of_a_clock_that_was_ahead_keeps_no_later_one_from_the_folder(run_job: Any, tmp_path: Path) -> None:
    attempts = tmp_path / "shared" / "checkpoints" / "digits" / "attempts"
    attempts.mkdir(parents=True)
    (attempts / "009999999999-000003-of-that-run").touch()
    run = run_job(DIGITS | {"nodes": 1, "args": ["--task", "digits", "--epochs", "1"]})
    assert run.end() == 0, run.text()
    newest = max(path.name for path in attempts.iterdir())
    assert newest.startswith("010000000000-000000-")


CLOCK_THAT_IS_SET = """
import datetime, os, sys
from pathlib import Path
from ddpjob_operator.cli.main import main
from ddpjob_operator.local import children, clock, display, processes, runner

class Clock(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return super().now(zone) + datetime.timedelta(hours=int(Path("set").exists()))

for module in (children, clock, display, processes, runner):
    module.datetime = Clock
main()
"""


def test_a_clock_that_is_set_ahead_meets_no_deadline(tmp_path: Path) -> None:
    spec = DIGITS | {"nodes": 1, "activeDeadlineSeconds": 1800} | held(STEPS // 4, EPOCHS)
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(job_object("digits", spec)))
    (tmp_path / "clock.py").write_text(CLOCK_THAT_IS_SET)
    command = ["clock.py", "run", "digits.yaml", "--logs", "none"]
    output = tmp_path / "output.txt"
    with output.open("wb") as out:
        process = Forked(command, environment(), out.fileno(), imported=RUNS, folder=tmp_path)
    run = Started(process, output, tmp_path / "shared")
    try:
        run.wait_for("loss")
        (tmp_path / "set").touch()
        let_go(run.shared)
        assert run.end() == 0, run.text()
    finally:
        process.kill()
        process.wait()


def test_a_missing_module_fails_the_job_in_its_first_attempt(run_job: Any, tmp_path: Path) -> None:
    run = run_job(script(tmp_path, "import torch_geometrik\n"))
    assert run.end() == 1
    text = run.text()
    assert "Failed: ImportError" in text
    assert "No module named 'torch_geometrik'" in text
    assert "add it with --requirements" in text
    assert "last lines of shared/logs/digits/pods/digits-0-0.log:" in text
    assert "Restarting" not in text
    logs = tmp_path / "shared" / "logs" / "digits" / "pods"
    assert [entry.name for entry in logs.iterdir()] == ["digits-0-0.log"]


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
print("asleep", flush=True)
while True:
    time.sleep(1000)
"""


def wait_for_log(run: Any, text: str, pod: str = "digits-0-0") -> None:
    log = run.shared / "logs" / "digits" / "pods" / f"{pod}.log"
    run.until(lambda: log.exists() and text in log.read_text(), f"{text!r} in {log}")


def test_a_second_ctrl_c_kills_what_does_not_stop(run_job: Any, tmp_path: Path) -> None:
    run = run_job(script(tmp_path, SLEEPER))
    wait_for_log(run, "asleep")
    run.process.send_signal(signal.SIGTERM)
    wait_for_log(run, "asked to stop")
    processes = run.descendants()
    _once_more(run, signal.SIGINT)
    assert run.end() == 143
    assert "stopped before the first step; the same command starts the script again" in run.text()
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def _once_more(run: Started, number: signal.Signals) -> None:
    """Ask again, which kills: within a second of the first signal it would be part of the same request."""
    time.sleep(1.1)
    run.process.send_signal(number)


def test_two_signals_of_one_request_let_ranks_save(run_job: Any) -> None:
    run = run_job(DIGITS | held(STEPS // 4, EPOCHS))
    run.wait_for("loss")
    run.process.send_signal(signal.SIGSTOP)  # it gets both at once, however late this test sends the second
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGTERM)  # another one, as the kernel would join two of the same kind
    run.process.send_signal(signal.SIGCONT)
    for pod in ("digits-0-0", "digits-0-1"):
        wait_for_log(run, "stopping: SIGTERM to 1 ranks", pod)
    let_go(run.shared)
    assert run.end() in (129, 143), run.text()
    said = re.search(
        r"stopped at step (\d+); run the same command again to resume from step (\d+)$", run.text().strip()
    )
    assert said is not None, run.text()
    assert said[1] == said[2]


def test_nohup_keeps_a_run_when_its_terminal_is_closed(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(job_object("digits", script(tmp_path, SLEEPER))))
    output = tmp_path / "output.txt"
    with output.open("wb") as out:
        process = subprocess.Popen(
            ["nohup", *COMMAND, "run", "digits.yaml"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    run = Started(process, output, tmp_path / "shared")
    try:
        wait_for_log(run, "asleep")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)  # a second signal to stop would kill the sleeper
        wait_for_log(run, "asked to stop")
        _once_more(run, signal.SIGTERM)
        assert run.end() == 143, run.text()
    finally:
        process.kill()
        process.wait()


def test_ctrl_z_says_that_the_ranks_go_on_and_stops_the_view(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(job_object("digits", script(tmp_path, SLEEPER))))
    output = tmp_path / "output.txt"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, "run", "digits.yaml"],
            cwd=tmp_path,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # with a parent outside of it, as a shell is; else the kernel stops nothing
        )
    run = Started(process, output, tmp_path / "shared")
    try:
        wait_for_log(run, "asleep")
        process.send_signal(signal.SIGTSTP)
        run.wait_for("the ranks train on")
        run.until(lambda: state_of(process.pid) == "T", "it is stopped")
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        wait_for_log(run, "asked to stop")
    finally:
        process.kill()
        process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_nothing_survives_a_killed_run(run_job: Any, tmp_path: Path) -> None:
    run = run_job(script(tmp_path, SLEEPER) | {"procsPerNode": 2})
    wait_for_log(run, "asleep")
    processes, (scratch,) = run.descendants(), run.scratch()
    assert len(processes) >= 4
    assert scratch.exists()
    run.process.send_signal(signal.SIGKILL)
    all_end(processes)
    assert not scratch.exists()


def test_restarts_end_with_the_budget_and_the_last_failure_is_reported(run_job: Any, tmp_path: Path) -> None:
    differs = "import os\nraise [KeyError, ValueError][int(os.environ['DDPJOB_ATTEMPT'])]('of this attempt')\n"
    spec = script(tmp_path, differs) | {"restart": {"maxRestarts": 1, "backoff": {"initialSeconds": 0}}}
    run = run_job(spec)
    assert run.end() == 1
    assert "BackoffLimitExceeded: all 1 restarts are used" in run.text()
    logs = run.shared / "logs" / "digits" / "pods"
    assert sorted(entry.name for entry in logs.iterdir()) == ["digits-0-0.log", "digits-1-0.log"]


def test_a_script_that_fails_twice_before_its_first_step_is_not_tried_again(run_job: Any, tmp_path: Path) -> None:
    run = run_job(script(tmp_path, "open('absent.csv')\n") | {"restart": {"backoff": {"initialSeconds": 0}}})
    assert run.end() == 1
    assert "RepeatedFailure: rank 0 raised FileNotFoundError" in run.text()
    assert "attempt 0 failed with the same error before its first step" in run.text()


WITH_A_SPARE = """
import json, os, sys, time
from pathlib import Path
def is_spared():
    status = json.loads(Path(os.environ["DDPJOB_SHARED"], "logs", "digits", "status.json").read_text())["status"]
    return status["nodes"]["spares"] == 1
place = [os.environ[f"DDPJOB_{name}"] for name in ("ATTEMPT", "NODE_RANK", "POD_NAME")]
print("at", *place, flush=True)
if place[0] == "0":
    while not is_spared():  # one that still starts takes no place
        time.sleep(0.02)
    if place[1] == "1":
        os._exit(3)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
"""


def test_a_spare_takes_the_place_of_a_pod_that_ended(run_job: Any, tmp_path: Path) -> None:
    in_place = {"scope": "InPlace", "backoff": {"initialSeconds": 0}}
    run = run_job(script(tmp_path, WITH_A_SPARE) | {"nodes": 2, "spares": 1, "restart": in_place})
    assert run.end() == 0, run.text()
    assert "restarts 1" in run.text()
    logs = run.shared / "logs" / "digits" / "pods"
    runs = [line for log in sorted(logs.iterdir()) for line in log.read_text().splitlines() if line.startswith("at ")]
    assert runs == [
        "at 0 0 digits-0-0",
        "at 1 0 digits-0-0",
        "at 0 1 digits-0-1",
        "at 1 1 digits-0-s0",
    ]


def test_data_is_fetched_before_the_gang_and_what_fails_is_reported(run_job: Any, tmp_path: Path) -> None:
    reads = script(
        tmp_path, "import os\nassert open(os.environ['DDPJOB_SHARED'] + '/datasets/x/y').read() == 'data\\n'\n"
    )
    first = {"name": "folder", "path": "datasets/x", "script": "mkdir datasets/x && echo folder made"}
    second = {"name": "file", "path": "datasets/x/y", "script": "echo data > datasets/x/y"}
    run = run_job(reads | {"initializers": [first, second]})
    assert run.end() == 0, run.text()
    log = (run.shared / "logs" / "digits" / "pods" / "digits-init-0.log").read_text()
    assert log.index("folder made") < log.index("file: datasets/x/y has 1 files, 5 bytes")

    nothing = {"name": "empty", "path": "datasets/z", "script": "true"}
    refused = run_job(reads | {"initializers": [nothing]})
    assert refused.end() == 1
    assert "initializer empty: the script has ended, and there is no datasets/z; correct the script" in refused.text()


def test_a_reader_that_goes_away_does_not_end_a_run(run_job: Any, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        run = run_job(script(tmp_path, "print('done')\n"), stdout=write)
    finally:
        os.close(write)
    assert run.end() == 0
    assert run.text() == ""


def test_a_chaos_run_whose_script_reports_no_total_says_so_at_the_first_step(run_job: Any, tmp_path: Path) -> None:
    text = """
import os, time
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while not os.path.exists(os.path.join(os.environ["DDPJOB_SHARED"], "go-0")):
    (weight**2).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""
    run = run_job(script(tmp_path, text), "--chaos", "kill-rank@50%")
    why = "the script reports its steps but not how many there will be, so 50% of them is not known; write kill-rank@"
    run.wait_for(f"\nchaos: {why}")
    let_go(run.shared)
    assert run.end() == 1
    note, end = run.text().split("Succeeded (Completed)")
    assert f"\nchaos: {why}" in note
    assert f"error: chaos: no rank was killed: {why}" in end
