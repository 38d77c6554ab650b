"""What to correct after an exception of a program: its type, and where it was raised in the program's own code.

The innermost frame is often in a library, which was called with what it cannot use. A tenant writes these texts: names
are taken from them only where they are plain.
"""

from __future__ import annotations

import re

from ddpjob_operator.core.values.trainer_report import TerminationReport

_TYPE = re.compile(r"(?:[\w<>]{1,80}\.){0,16}([A-Za-z_]\w{0,80})(?=:|$)")
_FRAME = re.compile(r'^ *(?:\| *)?File "([^"\n]{1,4096})", line (\d{1,7})\b', re.MULTILINE)
_NOT_OWN = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|/ddp_trainer/")
"""Files of Python, of installed packages and of the trainer."""
_PLAIN = re.compile(r"[\w.+-]{1,80}")


def advice_on_exception(report: TerminationReport, resumes_after: int | None) -> str:
    """Such as `Correct the KeyError in train.py, line 12, and apply the job again: it resumes from the snapshot of step
    300.` Empty where no exception is on record. `resumes_after` is the step of that snapshot, None if there is none.
    """
    kind = _TYPE.match(report.exception)
    if kind is None:
        return ""
    place = _own_place(report.traceback)
    what = f"the {kind[1]} in {place}," if place else f"what raises the {kind[1]}"
    if resumes_after is None:
        return f"Correct {what} and apply the job again; it has no snapshot to resume from."
    return f"Correct {what} and apply the job again: it resumes from the snapshot of step {resumes_after}."


def _own_place(traceback: str) -> str:
    """Such as `train.py, line 12`: the last frame of the program's own code; empty without one. Exceptions that another
    one followed from, and what waited for a data loader worker that raised, come before it.
    """
    if traceback.endswith("…"):
        return ""  # the kubelet has cut its end, where the frame that raised is
    frames = _FRAME.findall(traceback)
    path, line = next(((path, line) for path, line in reversed(frames) if not _NOT_OWN.search(path)), ("", ""))
    name = path.rpartition("/")[2]
    return f"{name}, line {line}" if _PLAIN.fullmatch(name) else ""
