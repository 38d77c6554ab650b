"""Processes and threads that a script starts: they end with it, and their end is not the rank's."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.support.processes import all_end

from ddp_trainer.contract.outcomes import read_outcomes

FRESH = True
"""A forked rank has exit handlers already: those of multiprocessing would run in another order."""

HELPER = """
    import multiprocessing, os, signal, sys, time
    from pathlib import Path
    here = Path(os.environ["DDPJOB_RUN_DIR"])

    def serve():
        (here / "helper").write_text(str(os.getpid()))
        while True:
            time.sleep(1000)

    def started():
        while not (here / "helper").exists():
            time.sleep(0.01)
"""


def test_a_process_that_a_script_forks_by_hand_leaves_no_record_of_the_ranks_end(start_pod):
    pod = start_pod(
        HELPER
        + """
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    from ddp_trainer.contract.outcomes import read_outcomes
    assert not read_outcomes(here)
    """
    )
    assert pod.wait() == 0, pod.log
    (outcome,) = read_outcomes(pod.run_dir)
    assert outcome["reason"] == "Completed"


def test_a_forked_child_that_comes_to_the_end_of_the_script_is_not_the_rank(start_pod):
    pod = start_pod(
        HELPER
        + """
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        raise ValueError("of the rank")
    """
    )
    assert pod.wait() == 1
    assert pod.message["message"] == "rank 0 raised ValueError: of the rank"


def test_a_daemon_does_not_inherit_the_ranks_handler_of_sigterm(start_pod):
    pod = start_pod(
        HELPER
        + """
    from ddp_trainer.rank.stop_request import StopRequest
    StopRequest().listen()
    multiprocessing.get_context("fork").Process(target=serve, daemon=True).start()
    started()
    """
    )
    assert pod.wait() == 0, pod.log
    assert "ended the processes" not in pod.log  # Python's own way was enough
    all_end([int((pod.run_dir / "helper").read_text())])


def test_a_daemon_that_ignores_sigterm_does_not_keep_a_finished_run_alive(start_pod):
    pod = start_pod(
        HELPER
        + """
    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve()
    multiprocessing.get_context("fork").Process(target=deaf, daemon=True, name="deaf").start()
    started()
    """
    )
    assert pod.wait() == 0, pod.log
    assert "the script is done; ended the processes that it left: deaf (" in pod.log
    assert pod.message["reason"] == "Completed"


def test_a_thread_that_never_ends_does_not_keep_a_finished_run_alive_and_its_end_is_on_record(start_pod):
    pod = start_pod(
        """
        import threading, time
        from ddp_trainer.contract import unfinished
        unfinished.END_SECONDS = 0.5
        threading.Thread(target=time.sleep, args=(1000,), name="server").start()
        """
    )
    assert pod.wait() == 0, pod.log
    assert "the script is done; ending its process, idle " in pod.log
    assert pod.message["reason"] == "Completed"
    assert pod.message["cut"].endswith("s after the script, with the threads MainThread, server")
    assert pod.message["cut"] in pod.message["message"]


def test_a_program_that_a_script_leaves_behind_is_ended_and_named(start_pod):
    pod = start_pod(
        """
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        """
    )
    assert pod.wait() == 0, pod.log
    assert "ddpjob: the script is done; ending the processes that it left: " in pod.log
    assert "(sleep 1000)" in pod.log


def test_the_exit_handlers_of_a_script_still_have_its_helpers(start_pod):
    pod = start_pod(
        HELPER
        + """
    import atexit
    helper = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    helper.start()
    atexit.register(lambda: print("alive at exit:", helper.is_alive(), flush=True))
    started()
    """
    )
    assert pod.wait() == 0, pod.log
    assert "alive at exit: True" in pod.log


def test_the_shared_memory_of_a_rank_that_is_killed_is_removed(start_pod):
    """Its resource tracker waits for the end of the process that the rank has forked, as for data loader workers."""
    segment = Path("/dev/shm", f"ddpjob-test-{uuid.uuid4().hex[:12]}")
    pod = start_pod(
        f"""
        import os, signal, time
        from multiprocessing.shared_memory import SharedMemory
        segment = SharedMemory(name="{segment.name}", create=True, size=4096)
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        print("made:", os.path.exists("{segment}"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    try:
        assert pod.wait() == 1, pod.log
        assert "made: True" in pod.log
        assert pod.message["signal"] == "SIGKILL"
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
