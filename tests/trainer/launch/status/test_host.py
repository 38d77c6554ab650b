"""What a container's control group and NVML say, as /metrics has it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_trainer.launch.status import host
from ddp_trainer.launch.status.host import GPU, GPUs, Throttling, ThrottlingWatch, Usage, usage

MIB = 1 << 20


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VERSION_2 = {
    "cgroup.controllers": "cpu memory",
    "a/cpu.stat": "usage_usec 2500000\nuser_usec 2000000\n",
    "a/memory.current": f"{300 * MIB}\n",
    "a/memory.max": f"{512 * MIB}\n",
    "a/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
}
VERSION_1 = {
    "cpuacct/cpuacct.usage": "2500000000\n",
    "memory/memory.usage_in_bytes": f"{300 * MIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {100 * MIB}\n",
}


@pytest.mark.parametrize(
    ("files", "own", "known"),
    [
        pytest.param(VERSION_2, "0::/a\n", Usage(2.5, 200 * MIB, 512 * MIB), id="version 2"),
        pytest.param(
            VERSION_2 | {"a/memory.max": "max\n"}, "0::/a\n", Usage(2.5, 200 * MIB, None), id="version 2, no limit"
        ),
        pytest.param(
            VERSION_1,
            "4:memory:/on/node\n3:cpu,cpuacct:/on/node\n",
            Usage(2.5, 200 * MIB, None),
            id="version 1",
        ),
        pytest.param({}, "", Usage(), id="none"),
        pytest.param({"cgroup.controllers": "", "cpu.stat": "nonsense\n"}, "0::/\n", Usage(), id="nothing to read"),
    ],
)
def test_the_control_group_says_what_the_container_has_used(tmp_path: Path, files: Any, own: str, known: Usage) -> None:
    written(tmp_path, {"self": own, **{f"group/{name}": text for name, text in files.items()}})
    assert usage(tmp_path / "group", tmp_path / "self") == known


def cpu_stat(version: int, periods: int, stopped: int, seconds: float) -> dict[str, str]:
    """What the kernel writes, of a container whose path on the node it does not see with version 1."""
    counts = f"nr_periods {periods}\nnr_throttled {stopped}\n"
    if version == 1:
        return {"cpu/cpu.stat": f"{counts}throttled_time {seconds * 1e9:.0f}\n"}
    return {"cgroup.controllers": "cpu", "a/cpu.stat": f"usage_usec 5\n{counts}throttled_usec {seconds * 1e6:.0f}\n"}


@pytest.mark.parametrize(("version", "own"), [(1, "4:memory:/on/node\n3:cpu,cpuacct:/on/node\n"), (2, "0::/a\n")])
def test_what_the_cpu_limit_did_is_that_of_the_last_minute(tmp_path: Path, version: int, own: str) -> None:
    written(tmp_path, {"self": own})
    watch = ThrottlingWatch(tmp_path / "group", tmp_path / "self")
    for second in range(121):  # it ran into its limit in the second minute alone
        late = max(0, second - 60)
        written(tmp_path / "group", cpu_stat(version, 1000 + second * 10, 7 + late * 5, 3.0 + late * 0.25))
        watch.look(float(second))
        if second == 60:
            assert watch.lately == Throttling(60.0, 600, 0, 0.0)
    assert watch.lately == Throttling(60.0, 600, 300, 15.0)


@pytest.mark.parametrize(
    "files", [{}, cpu_stat(1, 0, 0, 0.0), {"cgroup.controllers": "", "a/cpu.stat": "usage_usec 5\n"}]
)
def test_without_a_cpu_limit_nothing_is_said_of_throttling(tmp_path: Path, files: dict[str, str]) -> None:
    written(tmp_path, {"self": "0::/a\n", **{f"group/{name}": text for name, text in files.items()}})
    watch = ThrottlingWatch(tmp_path / "group", tmp_path / "self")
    for second in range(0, 30, 5):
        watch.look(float(second))
    assert watch.lately is None


class NVMLError(Exception):
    pass


def nvml(**calls: Any) -> Any:
    working = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=40 + device),
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=3, total=8),
    }
    return SimpleNamespace(**{**working, **calls})


def refused(device: int) -> Any:
    raise NVMLError("not supported")


def test_each_gpu_says_how_busy_it_is_and_what_it_holds() -> None:
    assert list(GPUs(nvml).look()) == [GPU(0, 0.4, 3, 8), GPU(1, 0.41, 3, 8)]


def test_what_a_gpu_does_not_say_is_left_out() -> None:
    slices = GPUs(lambda: nvml(nvmlDeviceGetUtilizationRates=refused, nvmlDeviceGetCount=lambda: 1))
    assert list(slices.look()) == [GPU(0, None, 3, 8)]


def test_a_gpu_that_is_lost_hides_no_other() -> None:
    gpus = GPUs(lambda: nvml(nvmlDeviceGetHandleByIndex=lambda index: index or refused(index)))
    for _ in range(2):
        assert list(gpus.look()) == [GPU(0, None, None, None), GPU(1, 0.41, 3, 8)]


def test_without_nvml_it_is_looked_for_once() -> None:
    tries: list[int] = []

    def missing() -> Any:
        tries.append(1)
        raise ModuleNotFoundError("pynvml")

    gpus = GPUs(missing)
    assert [list(gpus.look()), list(gpus.look()), len(tries)] == [[], [], 1]


def test_a_driver_that_does_not_answer_holds_up_one_scrape_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "GPU_SECONDS", 0.01)
    hangs = threading.Event()
    before = threading.active_count()
    gpus = GPUs(lambda: nvml(nvmlDeviceGetCount=hangs.wait))
    assert [list(gpus.look()) for _ in range(3)] == [[], [], []]
    assert threading.active_count() == before + 1
    hangs.set()
