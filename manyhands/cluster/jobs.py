"""Commands on the machines of a Ray cluster, handled like processes of this one. All machines need to see the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

from manyhands.cluster.host import join  # isort: skip – says what to install where Ray is not there

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from manyhands.machine import die_with_parent

ANSWER_S = 30.0  # a machine that says nothing for so long is taken for lost


class _Runner:
    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def run(self, command: list[str], log: str, folder: str) -> None:
        with open(log, "a") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=folder, process_group=0, preexec_fn=die_with_parent
            )

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


_Actor = cast(Any, ray.remote)(_Runner)


class RayProcess:
    """Waits for a machine with room. `lost`: the machine went away, nothing is known about how far it came. `reason`: why it
    could not be started."""

    def __init__(self, command: list[str], log: Path, cpus: int, gpus: float) -> None:
        self._actor = _Actor.options(num_cpus=cpus, num_gpus=gpus).remote()
        self._begun = self._actor.run.remote(command, str(log.resolve()), os.getcwd())
        self.returncode: int | None = None
        self.lost = False
        self.reason = ""

    def poll(self) -> int | None:
        if self.returncode is None and ray.wait([self._begun], timeout=0)[0]:
            try:
                ray.get(self._begun)
                self.returncode = ray.get(self._actor.poll.remote(), timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError):
                self.lost, self.returncode = True, -signal.SIGKILL
            except RayError as error:
                self.reason, self.returncode = str(error).strip().splitlines()[-1], 1
            if self.returncode is not None:
                ray.kill(self._actor)  # its room is free
        return self.returncode

    def send_signal(self, number: int) -> None:
        if ray.wait([self._begun], timeout=0)[0]:
            self._actor.signal.remote(number)
        elif self.returncode is None:
            ray.kill(self._actor)
            self.returncode = -number

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.2)
        assert self.returncode is not None
        return self.returncode


class Cluster:
    """Where the runs of a suite go; `share` cores each, of those of the largest machine at most."""

    def __init__(self, address: str, parallel: int) -> None:
        join(address, 1, "manyhands-suite")
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores, gpus = (sum(r.get(kind, 0) for r in resources) for kind in ("CPU", "GPU"))
        self.share = int(max(min(cores // parallel, max(r.get("CPU", 0) for r in resources)), 1))
        self._gpus = min(gpus / parallel, 1.0)

    def launch(self, command: list[str], log: Path) -> RayProcess:
        return RayProcess(command, log, self.share, self._gpus)

    def close(self) -> None:
        ray.shutdown()
