"""Real processes in tests: starting them, waiting for them, and seeing that they are gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

started: list[subprocess.Popen] = []  # by the running test


def command(*arguments, **options):
    started.append(subprocess.Popen([sys.executable, "-m", "manyhands", *map(str, arguments)], **options))
    return started[-1]


def start_run(recipe, run_dir, *options, total_steps=10_000_000, report_every=1000):
    """A run in a session of its own, with its first report written."""
    process = command(
        "train", recipe, "--run-dir", run_dir, "--total-steps", total_steps, "--report.every-steps", report_every,
        "--checkpoint.every-steps", 4000, *options, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: written(run_dir))
    return process


def wait_for(condition, timeout_s=60):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def alive(pids):
    result = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                result.append(pid)
        except (ProcessLookupError, FileNotFoundError):
            pass
    return result


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid):
    return [p for child in children(pid) for p in (child, *descendants(child))]


def written(run_dir):
    """A first report is there."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def shared_memory() -> set[str]:
    """Names under /dev/shm, but for the notes that Intel's OpenMP runtime keeps there while a process lives: other tests' may
    come, and those of the killed stay."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP")}
