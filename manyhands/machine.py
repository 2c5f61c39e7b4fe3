"""The machine we run on: its cores, its memory, its name. No torch at import: simulators' processes read this too."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


# What idle threads do in a process that waits for its callers most of the time: they need the cores.
BRIEFLY = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}

_ours: list[int] = []  # cores of this process's share, if it has one


def cores() -> int:
    """Those this process should use: all it may, or its share."""
    return len(_ours or _allowed())


def is_ours() -> bool:
    """Whether nobody else runs on it for most of the next hundredth of a second, as far as the kernel tells."""
    others = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(5):
            others.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
            time.sleep(0.002)
    return not others or sorted(others)[len(others) // 2] <= 0


def place_openmp() -> None:
    """Before torch is imported: which OpenMP runtime its CPU threads run under, and how long idle ones spin before they sleep.

    Under GNU's, which comes with torch: long where nobody else runs, with 100 000 spins instead of 20 000 A2C, PPO and DQN on
    Pong were 1.07, 1.04 and 1.11 times as fast; hardly at all elsewhere, where everybody would wait for everybody: two Snake
    trainings side by side on two cores had 1 000 steps/s each with 20 000 spins, 2 400 with 1 000.

    Intel's, which is used if it is there (manyhands[cpu]), wakes its threads sooner: taking turns with GNU's, A2C was 1.06 to
    1.15 times as fast, PPO 0.96 to 1.04, DQN 1.01 to 1.1. Spinning for 10 ms instead of one, its threads need not be woken after
    a step of the emulators: A2C 1.07 to 1.12 times as fast, PPO 1.04, DQN 1.01, Snake 1.25; two Snake trainings side by side
    7 000 steps/s each instead of 3 600.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "100000" if is_ours() else "1000")
    os.environ.setdefault("KMP_BLOCKTIME", "10")  # ms
    # Unless it is told, Intel's runtime leaves a forked child one core: all that a Ray cluster starts, or a suite.
    os.environ.setdefault("KMP_AFFINITY", "none")
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        wheel = importlib.metadata.distribution("intel-openmp")
        libraries = [wheel.locate_file(file) for file in wheel.files or () if file.name == "libiomp5.so"]
        for path in libraries:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL).omp_get_max_threads()
        # Its note that it is loaded would stay behind when this process is killed.
        Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)


def take_share(part: int, parts: int, pin: bool) -> None:
    """From now on this process counts on one of several equal shares of the cores; pinned, it also keeps to them."""
    allowed = _allowed()
    count = max(len(allowed) // parts, 1)
    first = part * count % len(allowed)
    _ours[:] = allowed[first : first + count]
    if pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _ours)


def pin_threads() -> None:
    """All that are there to this process's share: Intel's runtime gives its own all the cores that were there at first."""
    if _ours and hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), _ours)


def one_thread_per_core(threads: int) -> bool:
    """Whether pinning thread i to core i is fair to everybody: only where we may use, and do use, the whole machine."""
    return threads == cores() == os.cpu_count()


def keep_memory() -> None:
    """Ask glibc to keep freed memory: by default every large activation is handed back to the kernel and faulted in again,
    which took up to a fifth of a CPU run's time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def die_with_parent() -> None:
    """In a child, before it becomes another program: killed when who started it is gone, however that came."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_memory(device: Any) -> int:
    """Bytes that a device (a torch.device) could still give us. On a CPU also within the control group's limit."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = "/sys/fs/cgroup/memory."
    with contextlib.suppress(OSError, ValueError):  # no such file; "max" where there is no limit
        limit, used = (int(Path(f"{group}{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path(f"{group}stat").read_text().splitlines())
        cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))  # given back when somebody needs it
        free = min(free, limit - used + cached)
    return free


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def describe() -> dict[str, Any]:
    import torch

    model = _cpuinfo("model name") or platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    shared = {"mps": mps()} if gpu else {}
    return {"cpu": model, "cores": cores(), "gpu": gpu, **shared, "torch": torch.__version__, "python": platform.python_version()}


def is_amd() -> bool:
    return _cpuinfo("vendor_id") == "AuthenticAMD"


def multiplies_bf16() -> bool:
    """The CPU has instructions for it; torch emulates it on any other."""
    features = (_cpuinfo("flags") or _cpuinfo("Features")).split()  # x86, ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features)


def _cpuinfo(name: str) -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith(name))
    return ""


def mps() -> bool:
    """NVIDIA's Multi-Process Service is there: processes use a GPU at the same time instead of in turn."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
