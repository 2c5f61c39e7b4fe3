"""How a process places itself on the machine; each in a process of its own, since it cannot be taken back."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
INSTALLED = any(d.name == "intel-openmp" for d in importlib.metadata.distributions())


def run(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_pinned_process_keeps_all_its_threads_on_its_share():
    code = """
import os, torch, manyhands.machine as machine
torch.ones(1 << 20).add_(1)
machine.take_share(1, 2, True)
torch.set_num_threads(4)
torch.ones(1 << 20).add_(1)
machine.pin_threads()
for thread in os.listdir("/proc/self/task"):
    print(",".join(map(str, sorted(os.sched_getaffinity(int(thread))))))
"""
    masks = run(code)
    half = sorted(os.sched_getaffinity(0))[len(os.sched_getaffinity(0)) // 2 :]
    assert len(masks) >= 4 and {tuple(map(int, mask.split(","))) for mask in masks} == {tuple(half)}


@pytest.mark.skipif(not INSTALLED, reason="needs manyhands[cpu]")
def test_intels_openmp_takes_the_place_of_gnus_and_leaves_no_note():
    # That torch's threads really are its: it counts them, whoever started them.
    code = """
import ctypes, os, manyhands, torch
torch.set_num_threads(7)
with open("/proc/self/maps") as maps:
    library = next(line.split()[-1] for line in maps if "libiomp5" in line)
print(ctypes.CDLL(library).omp_get_max_threads())
print(any(f"_{os.getpid()}_" in name for name in os.listdir("/dev/shm")))
"""
    assert run(code) == ["7", "False"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_forked_child_may_use_every_core():
    """Python forks where a child is told to run something first, as Ray does for all that it starts."""
    code = """
import os, subprocess, sys
import manyhands, torch
torch.ones(1 << 20).add_(1)
child = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
subprocess.run(child, check=True, preexec_fn=lambda: None)
"""
    fresh = {name: value for name, value in os.environ.items() if not name.startswith("KMP_")}
    assert run(code, env=fresh) == [str(len(os.sched_getaffinity(0)))]
