"""Errors that are really raised here, reported by the trainer and explained by the operator: reason, and what to do.

What a machine without a GPU cannot be made to say is in tests/unit/core/failure/test_symptoms.py.
"""

from __future__ import annotations

import errno
import io
import multiprocessing.synchronize  # which cannot be imported while SemLock is patched
import os
import signal
import socket
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddp_trainer.contract.outcomes import outcome_of
from ddp_trainer.launch.exit.root_cause import ExitEvidence, find_cause
from ddp_trainer.launch.exit.termination_message import encode, message_of
from ddpjob_operator.core.failure.detect import find_failures
from ddpjob_operator.core.failure.diagnosis import Diagnosis, diagnose
from ddpjob_operator.core.values.observed import PodPhase, PodView, Termination
from ddpjob_operator.wire.objects import parse_time

NOW = parse_time("2026-01-01T00:00:00Z")


def explained(error: BaseException) -> Diagnosis:
    """What the operator makes of a pod whose only rank ended by `error`."""
    outcome = outcome_of(error, rank=0, local_rank=0, pid=71)
    evidence = ExitEvidence(wall=0.0, procs=1, outcomes=[outcome], started=1, agent_code=1)
    cause = find_cause(evidence)
    message = encode(message_of(cause, None, evidence)).decode()
    ended = Termination(cause.exit_code, reason="Error", message=message)
    pod = PodView("digits-0-0", "pod", 0, 0, PodPhase.FAILED, termination=ended)
    assert NOW is not None
    (failure,) = find_failures([pod], [], NOW)
    return diagnose(failure)


def denied(number: int, path: str) -> Callable[[Path], None]:
    """The system call failed: as root of this machine nobody is refused, but the words are the C library's."""

    def call(folder: Path) -> None:
        raise OSError(number, os.strerror(number), path)

    return call


class Deadly(Dataset[int]):
    """A data set that kills the worker which reads it, as the kernel does for want of memory."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def group_without_variables(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        dist.init_process_group("gloo")


def port_in_use(folder: Path) -> None:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        dist.TCPStore("localhost", held.getsockname()[1], is_master=True, use_libuv=False)


def gradient_without_a_value(folder: Path) -> None:
    with torch.autograd.set_detect_anomaly(True):
        (torch.zeros(1, requires_grad=True) * torch.inf).sqrt().sum().backward()


def no_room_for_a_lock(folder: Path) -> None:
    """As in a full /dev/shm: multiprocessing's own call fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_multiprocessing.SemLock", lambda *_: denied(errno.ENOSPC, "")(folder))
        multiprocessing.Lock()


def object_store_that_went_away(folder: Path) -> None:
    """As torch raises it again, with more of a traceback than a termination message holds."""
    frames = "".join(f'  File "/usr/lib/python3/botocore/x.py", line {line}, in send\n' for line in range(100))
    raise RuntimeError(
        "Caught ConnectionClosedError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f"{frames}botocore.exceptions.ConnectionClosedError: Connection was closed before we received a valid response"
    )


def unsafe_file(folder: Path) -> None:
    class Command:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    torch.save(Command(), folder / "model.pt")
    torch.load(folder / "model.pt")


def cut_file(folder: Path) -> None:
    whole = io.BytesIO()
    torch.save({"weight": torch.ones(1000)}, whole)
    (folder / "model.pt").write_bytes(whole.getvalue()[:2000])
    torch.load(folder / "model.pt")


def wrong_file(folder: Path) -> None:
    (folder / "model.pt").write_text("<html>404</html>")
    torch.load(folder / "model.pt")


def cut_image(folder: Path) -> None:
    picture = io.BytesIO()
    PIL.Image.new("RGB", (64, 64)).save(picture, "JPEG")
    PIL.Image.open(io.BytesIO(picture.getvalue()[:500])).load()


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@pytest.mark.parametrize(
    ("provoke", "reason"),
    [
        pytest.param(lambda _: torch.empty(1 << 50), "OutOfMemory", id="more memory than there is"),
        pytest.param(group_without_variables, "ProcessGroupInit", id="a group without RANK"),
        pytest.param(lambda _: dist.get_rank(), "ProcessGroupInit", id="a rank without a group"),
        pytest.param(port_in_use, "AddressInUse", id="a store on a port that is in use"),
        pytest.param(gradient_without_a_value, "LossNotFinite", id="a gradient that is no number"),
        pytest.param(
            lambda _: list(DataLoader(Deadly(), num_workers=1)),
            "DataWorkerDied",
            id="a data worker that is killed",
            marks=pytest.mark.processes,
        ),
        pytest.param(unsafe_file, "UnsafeFile", id="a pickle that would run a command"),
        pytest.param(cut_file, "DataCorrupted", id="a snapshot of the user's that was cut"),
        pytest.param(wrong_file, "DataCorrupted", id="a page that says 404 instead of a model"),
        pytest.param(lambda _: safetensors.torch.load(b"x" * 99), "DataCorrupted", id="safetensors that are none"),
        pytest.param(lambda _: PIL.Image.open(io.BytesIO(b"x")), "DataCorrupted", id="an image that is none"),
        pytest.param(cut_image, "DataCorrupted", id="an image that was cut"),
        pytest.param(lambda _: zipfile.ZipFile(io.BytesIO(b"x")), "DataCorrupted", id="an archive that is none"),
        pytest.param(
            lambda _: zlib.decompress(zlib.compress(b"x" * 99)[:-1] + b"?"), "DataCorrupted", id="a wrong checksum"
        ),
        pytest.param(lambda _: __import__("nowhere_to_be_found"), "ImportError", id="a module that is missing"),
        pytest.param(
            lambda _: __import__("ddp_trainer.gone"), "ImportError", id="a part of the trainer's that is missing"
        ),
        pytest.param(denied(errno.ENOSPC, "/mnt/shared/x"), "DiskFull", id="a full volume"),
        pytest.param(denied(errno.EDQUOT, "/mnt/shared/x"), "DiskFull", id="a quota"),
        pytest.param(denied(errno.ENOSPC, "/dev/shm/x"), "SharedMemoryFull", id="a full shared memory"),
        pytest.param(denied(errno.ENOSPC, "/root/.cache/torch_extensions/x"), "DiskFull", id="a full cache"),
        pytest.param(no_room_for_a_lock, "SharedMemoryFull", id="a full shared memory, for a lock"),
        pytest.param(object_store_that_went_away, "NetworkError", id="an object store that went away"),
        pytest.param(denied(errno.EACCES, "/mnt/shared/x"), "PermissionDenied", id="a volume of another user's"),
        pytest.param(denied(errno.EACCES, "/etc/models"), "PermissionDenied", id="a folder of root's"),
        pytest.param(denied(errno.EROFS, "/opt/cache"), "ReadOnlyFileSystem", id="a root that is read-only"),
        pytest.param(denied(errno.ESTALE, "/mnt/shared/x"), "VolumeError", id="a volume whose server restarted"),
        pytest.param(denied(errno.EIO, "/mnt/shared/x"), "VolumeError", id="a volume that cannot be read"),
        pytest.param(denied(errno.EMFILE, "/mnt/shared/x"), "TooManyOpenFiles", id="too many open files"),
        pytest.param(denied(errno.EAGAIN, "fork"), "TooManyThreads", id="too many processes"),
        pytest.param(
            lambda _: socket.getaddrinfo("nowhere.invalid", 80), "NetworkError", id="a host that nobody knows"
        ),
    ],
)
def test_an_error_is_told_by_the_trainer_and_explained_by_the_operator(
    provoke: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BaseException) as raised:
        provoke(tmp_path)
    found = explained(raised.value)
    assert found.reason == reason
    assert found.advice.endswith(".")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built with CUDA")
@pytest.mark.parametrize("use", [lambda: torch.ones(1, device="cuda"), lambda: torch.cuda.set_device(0)])
def test_cuda_on_an_image_for_the_cpu_is_explained(use: Callable[[], Any]) -> None:
    with pytest.raises((AssertionError, AttributeError)) as raised:
        use()
    assert explained(raised.value).reason == "CUDANotInImage"


def test_a_full_disk_of_the_node_is_not_taken_for_the_volume() -> None:
    found = explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/torchinductor_root/x"))
    assert found.reason == "DiskFull"
    assert "not /mnt/shared" in found.advice


def test_an_error_of_the_users_own_is_left_as_it_is() -> None:
    found = explained(ValueError("the colour is wrong"))
    assert (found.reason, found.deterministic, found.node_suspect) == ("WorkerException", True, False)
