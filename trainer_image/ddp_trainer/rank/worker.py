"""What torchrun starts for every rank: run the script as if by `python`, and leave a record of how it ended.

    torchrun … -m ddp_trainer.rank.worker module ddp_trainer.train ARG…
    torchrun … -m ddp_trainer.rank.worker script /path/train.py ARG…

The script is not touched: it is `__main__`, `sys.argv` is its own, and its exit code is its own, with one exception.
A preempted rank exits 0 towards torchrun, which would otherwise signal the ranks that are still saving.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from ddp_trainer.contract import open_files
from ddp_trainer.contract.environment import RankEnvironment, number_live_rank, parse_job, parse_rank
from ddp_trainer.contract.exit_codes import EXIT_OK, EXIT_PREEMPTED, LiveRecoveryFailed, Preempted, RollBack, UserError
from ddp_trainer.contract.heartbeat import Heartbeat
from ddp_trainer.contract.outcomes import classify, exit_text, outcome_of, record_cut, reserve_outcome, write_outcome
from ddp_trainer.contract.process_end import (
    end_after_exit_handlers,
    end_failed,
    end_helpers_at_exit,
    restore_stderr,
    settle,
)
from ddp_trainer.contract.processes import die_with
from ddp_trainer.contract.run_dir import STACK_SIGNAL, register, stack_file, stderr_pipe, stdout_pipe
from ddp_trainer.contract.standard_error import say
from ddp_trainer.rank import live_scripts
from ddp_trainer.rank.destroyed_groups import keep_destroyed_groups
from ddp_trainer.rank.failures import behind_exit, call_hook, failed
from ddp_trainer.rank.garbage import import_torch_without_collections
from ddp_trainer.rank.observe import ScriptObserver, observe
from ddp_trainer.rank.own_groups import guard
from ddp_trainer.rank.stop_request import is_asked_to_stop, preempted_after
from ddp_trainer.rank.unfinished_saves import UnfinishedSaves
from ddp_trainer.rank.volume_imports import hide_folders
from ddp_trainer.rank.whole_saves import save_whole_files
from ddp_trainer.rank.work_folder import enter_work_folder

_exit: Final = os._exit
_has_record = False
_own: RankEnvironment | None = None
"""As it was before the script, which may change the environment."""


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code towards torchrun."""
    global _own
    number_live_rank(os.environ)
    own = _own = parse_rank(os.environ)
    if own.agent_pid is not None:
        die_with(own.agent_pid)
    assert own.run_dir is not None, "DDPJOB_RUN_DIR is not set: the launcher starts this module"
    _register(own.run_dir, own.rank, own.local_rank)
    import_torch_without_collections()
    failure: BaseException | None = None
    is_printed = False
    own_script = not _is_built_in(argv[0], argv[1])
    job = parse_job(os.environ, default_name="training")
    observer = None
    if own_script and own.observe_script:
        observer = observe(Heartbeat.from_env(observed=True), own.world_size, non_finite_loss=job.non_finite_loss)
    is_live = own_script and job.live is not None
    attempt = f"{job.uid}-{job.attempt}"
    guard(own, attempt=attempt, is_live=is_live)
    keep_destroyed_groups()
    if own_script:
        files = 1 if own.rank == 0 else own.world_size
        save_whole_files(f"{job.name}-rank{own.rank}", files, job.log_dir / "saving", attempt)
        unfinished = UnfinishedSaves(job.log_dir / "unfinished", attempt, own.rank)
        unfinished.remove()
        unfinished.watch()
    if is_live:
        live_scripts.expect()
    pid = os.getpid()
    record_os_exit(own, observer)
    record_exec(own)
    try:
        if own_script or job.code_sha256 is not None:
            enter_work_folder(job, own.scratch)
        if own_script:
            hide_folders(job.shared)
        run_target(argv[0], argv[1], argv[2:])
    except BaseException as error:
        if os.getpid() != pid:
            raise
        cause = behind_exit(error)
        restore_stderr()
        failed(cause)
        failure = live_scripts.explained(cause)
        is_printed = failure is cause and cause is not error
    restore_stderr()
    if failure is None and os.getpid() == pid:
        failure = live_scripts.missing()
    if os.getpid() != pid:
        return EXIT_OK  # a process that the script forked has come to its end: the record is the rank's
    outcome = _outcome(own, failure)
    unseen = failure if outcome["traceback"] is not None and not is_printed else None
    if isinstance(failure, SystemExit) and (text := exit_text(failure)) is not None:
        say(text)
    elif isinstance(failure, UserError | RollBack | LiveRecoveryFailed):
        say(f"ddp_trainer: {failure}")
    elif unseen is not None:
        say("".join(traceback.format_exception(unseen)).rstrip("\n"))
    _leave_record(own, outcome, observer)
    code = outcome["exitCode"]
    if code not in (EXIT_OK, EXIT_PREEMPTED):
        # The script's hook and exit handlers run now, and one that waits for a lost peer may never return. The record
        # is written; peers that recover live wait for the end of this process.
        end_failed(code, 0.0 if job.live is not None else own.shutdown_seconds)
    if unseen is not None:
        call_hook(unseen)
    return EXIT_OK if code == EXIT_PREEMPTED else code


def _outcome(own: RankEnvironment, failure: BaseException | None) -> dict[str, Any]:
    if preempted_after() is not None and (failure is None or classify(failure)[0] == EXIT_OK):
        # a loop of the user's own that left in order, as it was asked to: it is not done
        failure = Preempted(f"asked to stop after step {preempted_after()}")
    if isinstance(failure, SystemExit) and classify(failure)[0] == EXIT_PREEMPTED and is_asked_to_stop():
        failure = Preempted("asked to stop")
    return outcome_of(failure, rank=own.rank, local_rank=own.local_rank, pid=os.getpid())


def _leave_record(own: RankEnvironment, outcome: dict[str, Any], observer: ScriptObserver | None) -> None:
    assert own.run_dir is not None
    global _has_record
    _has_record = True  # whatever ends this process from here on
    try:
        write_outcome(own.run_dir, outcome)
    except OSError as error:  # the launcher then knows the exit code and what is on stderr
        say(f"ddp_trainer: no record of how this rank ended: {error}")
    if observer is not None and outcome["exitCode"] == EXIT_OK:
        observer.done()


def record_os_exit(own: RankEnvironment, observer: ScriptObserver | None) -> None:
    """A script that leaves by `os._exit(0)`, as some do where a library hangs at its end, leaves a record too. The
    launcher takes a rank without one for a failure, and ends the ranks that are still at work.
    """
    pid = os.getpid()

    def recorded(status: int) -> NoReturn:
        if status == EXIT_OK and os.getpid() == pid and not _has_record:
            with contextlib.suppress(Exception):
                _leave_record(own, _outcome(own, live_scripts.missing()), observer)
        _exit(status)

    os._exit = recorded


def record_exec(own: RankEnvironment) -> None:
    """A script that replaces itself by another program, as one does that sets PYTHONHASHSEED and starts anew, says so:
    that program leaves no record, and only torchrun learns how it ended.
    """
    pid, assigned = os.getpid(), (own.rank, own.local_rank)

    def announced(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def replaced(*args: Any, **kwargs: Any) -> NoReturn:
            assert own.run_dir is not None
            if os.getpid() != pid:
                execute(*args, **kwargs)
            with contextlib.suppress(OSError):
                register(own.run_dir, *assigned, pid, replaced=True)
            try:
                execute(*args, **kwargs)
            finally:  # there is no such program
                register(own.run_dir, *assigned, pid)

        return replaced

    # the others of their kind, such as os.execvp, call these
    os.execv, os.execve = announced(os.execv), announced(os.execve)


def cut(text: str) -> None:
    """Leave on record what was ended although it may not have been done, after the script of this rank had returned."""
    assert _own is not None
    assert _own.run_dir is not None
    record_cut(_own.run_dir, _own.rank, text)


def run_target(kind: str, name: str, args: Sequence[str]) -> None:
    """Run a module or a script as `__main__` with `args`. Raises what it raises, UserError if there is none."""
    if kind == "module":
        # `python -m` puts the working directory first; torchrun was started that way, so it is there already
        sys.argv = [name, *args]
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
        sys.argv[0] = spec.origin
        runpy._run_code(code, _main_module().__dict__, None, "__main__", spec)  # type: ignore[attr-defined]
        return
    script = Path.cwd() / name
    if not script.is_file():
        below = "" if Path(name).is_absolute() else f" (it is looked up in the working directory, {Path.cwd()})"
        raise UserError(
            f"the script {name} does not exist in this image or on its volumes{below}; check spec.entrypoint.script"
        )
    sys.argv = [str(script), *args]
    # As Python does, except for a link in the working directory: the modules beside it are meant.
    folder = script.resolve().parent if Path(name).is_absolute() else script.parent
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))
    if script.suffix == ".pyc" or pkgutil.get_importer(str(script)) is not None:  # such as a zip file
        runpy.run_path(str(script), run_name="__main__")
        return
    main_module = _main_module()
    main_module.__file__ = str(script)
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)  # of the future statements here
    exec(code, main_module.__dict__)  # noqa: S102 - as `python` does


def _main_module() -> ModuleType:
    """A new `__main__`, which stays: `runpy.run_path` takes its own away when the script returns, and threads, exit
    handlers and processes that it has started may still need what is in it, as to pickle an object of its classes.
    `multiprocessing` has noted the `__main__` of its own import under a second name, by which a process that it spawns
    calls the script: an object that comes back from there is of a class in it.
    """
    found = ModuleType("__main__")
    found.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = sys.modules["__mp_main__"] = found
    return found


def drop_script() -> None:
    """After all exit handlers, as Python does at its end: what only the destructor of an object finishes, such as a
    video, is finished. A thread that still runs code of the script keeps all of it.
    """
    if not _is_built_in("module", getattr(sys.modules["__main__"].__spec__, "name", "")):
        open_files.keep_archives()
        sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
        gc.collect()


def _is_built_in(kind: str, name: str) -> bool:
    return kind == "module" and name.partition(".")[0] == "ddp_trainer" and name != "ddp_trainer.call"


def _register(run_dir: Path, rank: int, local_rank: int) -> None:
    for pipe, stream in ((stdout_pipe(run_dir, local_rank), 1), (stderr_pipe(run_dir, local_rank), 2)):
        if pipe.is_fifo():
            reader = os.open(pipe, os.O_WRONLY)
            os.dup2(reader, stream)
            os.close(reader)
    stacks = stack_file(run_dir, local_rank)
    stacks.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(STACK_SIGNAL, file=stacks.open("a"), all_threads=True, chain=False)
    # a crash in C, such as a segmentation fault, says where on stderr
    faulthandler.enable()
    reserve_outcome(run_dir, rank)
    register(run_dir, rank, local_rank, os.getpid())


if __name__ == "__main__":
    # Not the copy of this module that is __main__: its place in sys.modules is the script's.
    from ddp_trainer.rank import worker

    end_after_exit_handlers()
    atexit.register(worker.drop_script)
    end_helpers_at_exit()
    sys.exit(settle(worker.main(sys.argv[1:]), worker.cut))
