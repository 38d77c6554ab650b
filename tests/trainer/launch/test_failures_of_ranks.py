"""What the termination message says when a rank fails, under the real torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.starting import starts_processes
from tests.trainer.launch.conftest import ROOT, Pod

TRAIN = """
    import os, sys, time
    from ddp_trainer.contract.heartbeat import Heartbeat
    heartbeat = Heartbeat.from_env()
    heartbeat.resumed(0)
    heartbeat.enter("train")
    heartbeat.step(step=7, epoch=1, total_steps=400, samples=448, loss=0.5)
    heartbeat.metrics(eval_accuracy=0.9)
    heartbeat.snapshot(5, 1763703999.0, True)
"""


@pytest.mark.fault(29)
def test_a_rank_that_is_killed_is_named_with_its_signal_and_step(start_pod):
    pod = start_pod(
        TRAIN
        + """
    from pathlib import Path
    reported = Path(os.environ["DDPJOB_RUN_DIR"], "rank-0-has-reported")
    if os.environ["RANK"] == "0":
        reported.touch()
        time.sleep(600)
    while not reported.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
    """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 1
    message = pod.message
    assert message["message"] == "rank 1 was killed by SIGKILL after step 7"
    assert (message["outcome"], message["reason"], message["signal"]) == ("Failed", "WorkerKilled", "SIGKILL")
    assert (message["rank"], message["localRank"], message["nodeRank"]) == (1, 1, 0)
    assert (message["step"], message["totalSteps"], message["loss"]) == (7, 400, 0.5)
    assert message["snapshot"] == {"step": 5, "time": 1763703999.0, "verified": True, "bytes": None}
    assert message["metrics"] == {"eval_accuracy": 0.9}


def test_a_failed_rank_that_cannot_leave_is_ended_and_its_cause_kept(start_pod):
    pod = start_pod(
        TRAIN
        + """
    import atexit
    # as the parts of torch do that wait for a peer which is gone
    atexit.register(time.sleep, 600)
    raise ValueError("loss is NaN")
    """
    )
    assert pod.wait() == 1
    assert pod.message["message"] == "rank 0 raised ValueError after step 7: loss is NaN"


def test_an_exception_is_reported_with_the_frames_of_the_script_only(start_pod):
    pod = start_pod(
        TRAIN
        + """
    def diverge():
        raise ValueError("loss is NaN")
    diverge()
    """
    )
    assert pod.wait() == 1
    message = pod.message
    assert message["message"] == "rank 0 raised ValueError after step 7: loss is NaN"
    assert (message["reason"], message["exception"]) == ("WorkerException", "ValueError: loss is NaN")
    assert "in diverge" in message["traceback"]
    assert "runpy" not in message["traceback"]


@pytest.mark.fault(29)
def test_the_first_cause_wins_over_the_ranks_that_only_lost_it(start_pod):
    pod = start_pod(
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "1":
            raise ValueError("broken batch")
        dist.all_reduce(torch.ones(1))
        """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 1
    assert pod.message["message"] == "rank 1 raised ValueError: broken batch"


def test_a_rank_that_saves_beside_one_that_has_failed_keeps_its_data_loader_workers(start_pod):
    """torchrun's SIGTERM goes to whole process groups, and torch raises the end of such a worker in the rank."""
    pod = start_pod(
        """
        import os, signal, time
        from pathlib import Path
        from torch.utils.data import DataLoader
        from ddp_trainer.contract.heartbeat import Heartbeat
        saves = Path(os.environ["DDPJOB_RUN_DIR"], "rank-0-saves")
        if os.environ["RANK"] == "1":
            while not saves.exists():
                time.sleep(0.01)
            raise ValueError("broken batch")
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        batches = iter(DataLoader(range(100), num_workers=1))
        next(batches)
        Heartbeat.from_env().enter("save")
        saves.touch()
        while not asked:
            time.sleep(0.01)
        time.sleep(1.0)
        print("the snapshot is complete", flush=True)
        """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 1
    assert "the snapshot is complete" in pod.log, pod.log
    assert pod.message["message"] == "rank 1 raised ValueError: broken batch"


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("script", "code", "reason", "words"),
    [
        ("import no_such_package", 64, "ImportError", "No module named 'no_such_package'"),
        ("def broken(:", 64, "UserError", "train.py"),
        ("import argparse; argparse.ArgumentParser(prog='train').parse_args(['--lr'])", 64, "UserError", "--lr"),
        ("raise SystemExit('the data set is empty')", 1, "WorkerException", "rank 0 exited: the data set is empty"),
        (
            "import os, sys; print('driver lost', file=sys.stderr, flush=True); os._exit(3)",
            3,
            "WorkerException",
            "rank 0 exited with code 3 without a Python exception; its last lines on stderr: driver lost",
        ),
        ("import faulthandler; faulthandler._sigsegv()", 1, "WorkerKilled", "Segmentation fault"),
        (
            "from ddp_trainer.contract.exit_codes import FencedError; raise FencedError('attempt 3 owns it')",
            77,
            "Fenced",
            "attempt 3",
        ),
    ],
    ids=["import", "syntax", "argparse", "exit-text", "os-exit", "segfault", "fenced"],
)
def test_each_way_to_fail_has_its_exit_code_and_its_reason(start_pod, script, code, reason, words):
    pod = start_pod(script)
    assert pod.wait() == code
    message = pod.message
    assert (message["exitCode"], message["reason"]) == (code, reason)
    assert words in message["message"]


@pytest.mark.parametrize("leave", ["os._exit(143)", "sys.exit(143)"])
def test_a_script_that_exits_as_preempted_without_being_asked_has_failed(start_pod, leave):
    """It passes on how a program has ended, say. As a disruption it would be restarted without an end."""
    pod = start_pod(f"import os, sys; {leave}")
    assert pod.wait() == 1
    assert (pod.message["reason"], pod.message["signal"], pod.message["rank"]) == ("WorkerKilled", "SIGTERM", 0)
    assert "exited with code 143 (128 + SIGTERM" in pod.message["message"]


def test_a_rank_that_has_noted_sigterm_may_exit_as_preempted(start_pod):
    """A person has sent it to this rank alone, and not to the launcher."""
    pod = start_pod(
        """
        import os, signal, sys
        from ddp_trainer.rank.stop_request import StopRequest
        StopRequest().listen()
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(143)
        """
    )
    assert pod.wait() == 143
    assert pod.message["reason"] == "Preempted"


@pytest.mark.parametrize("leave", ["os._exit(137)", "sys.exit(137)"])
def test_an_exit_code_that_stands_for_a_signal_is_read_as_one(start_pod, leave):
    pod = start_pod(f"import os, sys; {leave}")
    assert pod.wait() == 137
    assert (pod.message["reason"], pod.message["signal"]) == ("WorkerKilled", "SIGKILL")
    assert "exited with code 137 (128 + SIGKILL" in pod.message["message"]


def test_a_script_that_starts_itself_anew_ends_as_with_torchrun(start_pod):
    """Nobody records how the new program ends, and that is no failure that ends the other rank after a while."""
    pod = start_pod(
        """
        import os, sys, time
        if "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        if os.environ["RANK"] == "0":
            time.sleep(15)  # longer than ranks may live beside one that has failed
            print("evaluated", flush=True)
        """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 0, pod.log
    assert "evaluated" in pod.log


def test_an_end_without_a_word_is_said_to_be_one(start_pod):
    pod = start_pod("import os; os._exit(9)")
    assert pod.wait() == 9
    assert pod.message["message"] == (
        "rank 0 exited with code 9 without a Python exception; it printed nothing on stderr"
    )


def test_a_crash_right_after_a_step_is_reported_with_that_step(start_pod):
    pod = start_pod(
        """
        import os, signal
        from ddp_trainer.contract.heartbeat import Heartbeat
        heartbeat = Heartbeat.from_env()
        heartbeat.enter("train")
        for step in range(1, 31):
            heartbeat.step(step=step)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert pod.wait() == 1
    assert pod.message["message"] == "rank 0 was killed by SIGKILL after step 30"
    assert pod.message["step"] == 30


def test_a_timeout_of_a_collective_names_the_rank_that_did_not_join_it(start_pod):
    pod = start_pod(
        """
        import datetime, os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
        if os.environ["RANK"] == "1":
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
        """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 1
    assert (pod.message["rank"], pod.message["reason"]) == (1, "PeerLost"), pod.message["message"]
    assert "Timed out waiting 10000ms" in pod.message["message"]
    assert "rank 1 did not join a collective in time" in pod.message["message"]


def test_a_rank_that_returns_early_is_named_by_the_one_that_waits_for_it(start_pod):
    pod = start_pod(
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "0":
            dist.all_reduce(torch.ones(1))
        """,
        DDPJOB_PROCS_PER_NODE="2",
    )
    assert pod.wait() == 1
    assert pod.message["reason"] == "PeerLost"
    assert pod.message["message"].endswith("rank 1 had already finished its script")


def test_a_wrong_flag_of_the_built_in_trainer_is_said_once_in_one_line(start_pod):
    pod = start_pod("", argv=["--module", "ddp_trainer.train", "--", "--epoch", "3"])
    assert pod.wait() == 64
    assert "did you mean --epochs?" in pod.message["message"]
    assert pod.message["traceback"] is None
    assert "Traceback" not in pod.log


def test_a_script_that_does_not_exist_is_the_users_error(start_pod, tmp_path):
    pod = start_pod(tmp_path / "nowhere.py")
    assert pod.wait() == 64
    assert "nowhere.py does not exist" in pod.message["message"]
    assert "spec.entrypoint.script" in pod.message["message"]


def test_a_script_sees_the_arguments_and_main_module_of_python_and_works_on_the_volume(start_pod):
    pod = start_pod(
        """
        import os, sys
        from pathlib import Path
        import sibling
        assert __name__ == "__main__" and sys.modules["__main__"].sibling is sibling
        assert sys.argv == [__file__, "--lr", "0.1", "--", "$(rm -rf /)", ""], sys.argv
        Path("kept").touch()
        """,
        "--lr", "0.1", "--", "$(rm -rf /)", "",
        DDPJOB_SCRATCH=str(Path.cwd()),
    )  # fmt: skip
    (pod.directory / "sibling.py").write_text("")
    assert pod.wait() == 0, pod.log
    assert (pod.shared / "work" / "digits" / "kept").exists()
    assert (pod.message["outcome"], pod.message["reason"]) == ("Succeeded", "Completed")


def test_a_module_runs_as_main_with_its_arguments(start_pod):
    pod = start_pod("", argv=["--module", "json.tool", "--", "/no/such/file.json"])
    assert pod.wait() == 64  # json.tool hands this to argparse, which exits with 2
    assert "/no/such/file.json" in pod.message["message"]


@pytest.mark.fault(48)
def test_a_secret_in_an_exception_does_not_reach_the_message(start_pod):
    pod = start_pod(
        "import os; raise ValueError('login failed: ' + os.environ['WANDB_API_KEY'])", WANDB_API_KEY="s3cr3t-key"
    )
    assert pod.wait() == 1
    assert "s3cr3t-key" not in str(pod.message)
    assert "login failed: ***" in pod.message["message"]


def test_a_bad_variable_is_refused_by_name_before_torchrun_starts(start_pod):
    pod = start_pod("", DDPJOB_NODES="two", DDPJOB_UID="")
    assert pod.wait() == 64
    assert pod.message["outcome"] == "UserError"
    assert "DDPJOB_NODES='two' must be a whole number" in pod.message["message"]
    assert "DDPJOB_UID is not set" in pod.message["message"]


@pytest.fixture
@starts_processes
def without_torch(tmp_path: Path) -> Iterator[Pod]:
    """A pod whose torch lacks a library of CUDA."""
    (tmp_path / "torch").mkdir()
    problem = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({problem!r})")
    path = os.pathsep.join((str(tmp_path), str(ROOT / "trainer_image")))
    pod = Pod(tmp_path, tmp_path / "shared", ["--script", "train.py"], {"PYTHONPATH": path}, fresh=True)
    yield pod
    pod.end()


def test_a_torch_that_cannot_be_imported_is_named_and_not_tried_again(without_torch: Pod) -> None:
    assert without_torch.wait() == 64, without_torch.log
    message = without_torch.message
    assert (message["reason"], message["message"]) == (
        "ImportError",
        "torch cannot be imported: ImportError: libcudnn.so.9: cannot open shared object file: No such file or "
        "directory",
    )
