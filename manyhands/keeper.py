"""The keeper of the parameter servers, in the run's own process: starts them, keeps their snapshots, replaces the lost."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.config import Recipe
from manyhands.hosts.door import new_name
from manyhands.hosts.process import ChildError, ChildLost
from manyhands.machine import cores
from manyhands.maths import random
from manyhands.memory.replay import ReplayConfig
from manyhands.memory.server import ReplayServer
from manyhands.nets.flat import Model
from manyhands.stores.chief import Chief
from manyhands.stores.server import Server
from manyhands.stores.servers import ServersConfig
from manyhands.types import Clock, EnvSpec, Future, Handle, Host, Places, RunError

REPORT_S = 0.5  # how often a server says that it is alive
MOST_THREADS = 4  # of a server
SILENT_S = 20.0  # after which it is taken for lost


class Watched:
    """A server or the chief: its handle, and what it was asked last."""

    def __init__(self, start: Callable[[], Handle], name: str) -> None:
        self.start, self.name = start, name
        self.handle = start()
        self.asked: dict[str, Future] = {}
        self.asked_at: dict[str, float] = {}
        self.report: dict[str, Any] = {}
        self.snapshot: dict[str, Any] | None = None
        self.ledger: list[dict[str, Any]] = []

    def ask(self, method: str, every_s: float) -> None:
        if method not in self.asked and time.monotonic() - self.asked_at.get(method, 0.0) >= every_s:
            self.asked[method] = self.handle.call(method, timeout_s=SILENT_S)
            self.asked_at[method] = time.monotonic()

    def take(self) -> Counter[int]:
        """What has been answered; raises when it is lost."""
        stale = Counter[int]()
        for method, call in list(self.asked.items()):
            if call.done():
                del self.asked[method]
                if method == "report":
                    self.report = call.result()
                    stale.update(self.report.pop("staleness", {}))
                    self.ledger += self.report.pop("ledger", [])
                else:
                    self.keep(call.result())
        return stale

    def now(self, method: str) -> dict[str, Any]:
        """Asks and waits; what was asked before is taken first, so that nothing it told is lost."""
        for call in self.asked.values():
            call.result()
        self.take()
        return self.handle.call(method, timeout_s=SILENT_S).result()

    def keep(self, snapshot: dict[str, Any]) -> None:
        self.ledger += snapshot.pop("ledger", [])
        self.snapshot = snapshot


class Keeper:
    def __init__(
        self, host: Host, recipe: Recipe, model: Model, spec: EnvSpec, warn: Callable[[str], None], state: dict | None
    ) -> None:
        assert isinstance(recipe.store, ServersConfig)
        self._host, self._recipe, self._config, self._warn = host, recipe, recipe.store, warn
        self._pieces = self._config.pieces(model.parameters.numel())
        self._vectors, self._scalars = _names(recipe.rule.initial_state(torch.zeros(2)))
        self._restarts_left = self._config.restarts
        self.replaced = 0
        self._ledger: list[dict[str, Any]] = []
        self._lost = 0  # updates, on the shard that lost most of them
        self._lives = [0] * len(self._pieces) if state is None else _lives(state, len(self._pieces))
        snapshots = self._split(initial_state(recipe, model) if state is None else state)
        run = new_name()
        self._doors = [f"{run}-server-{number}" for number in range(len(self._pieces))]
        self._titles = [f"parameter server {number} of {len(self._pieces)}" for number in range(len(self._pieces))]
        addresses = tuple(host.address(door, title) for door, title in zip(self._doors, self._titles, strict=True))
        chief = host.address(f"{run}-chief", "the chief") if self._config.gather else None
        memory = recipe.memory
        shards = memory.shards if isinstance(memory, ReplayConfig) else 0
        replays = tuple(host.address(f"{run}-replay-{i}", f"replay {i} of {shards}") for i in range(shards))
        self.at = Places(addresses, chief, replays)
        self._spec, self._run = spec, run
        self._here = list(range(recipe.topology.learners))
        self._servers: list[Watched] = []
        self._chief: Watched | None = None
        self._replays: list[Watched] = []
        self._paused = False
        self._replay_lives = [0] * shards
        try:
            for number, snapshot in enumerate(snapshots):
                self._servers.append(self._watch_server(number, snapshot))
                if state is not None:
                    self._note_beginning(number, snapshot)
            if chief is not None:
                self._chief = Watched(lambda: self._start_chief(f"{run}-chief"), "the chief")
            for number in range(shards):
                self._replays.append(self._watch_replay(number))
        except BaseException:
            self.close()
            raise

    def _watch_server(self, number: int, snapshot: dict[str, Any]) -> Watched:
        server = Watched(lambda: self._start_server(number, snapshot), self._titles[number])
        server.snapshot = snapshot
        return server

    def _start_server(self, number: int, snapshot: dict[str, Any]) -> Handle:
        size = self._pieces[number].stop - self._pieces[number].start
        # A lone learner leaves its core free while it waits for the update; several never do.
        topology = self._recipe.topology
        shared_by = len(self._pieces) * topology.learners if topology.host == "process" else cores()
        threads = min(max(cores() // shared_by, 1), MOST_THREADS)
        arguments = (self._recipe.rule, size, self._config.limits, self._lives[number], snapshot, threads)
        return self._host.start(Server, *arguments, name=self._titles[number], threads=threads, door=self._doors[number])

    def _start_chief(self, door: str) -> Handle:
        recipe = self._recipe
        arguments = (self.at.servers, recipe.rule, recipe.total_steps, self._config.gather, self._here)
        return self._host.start(Chief, *arguments, name="the chief", door=door)

    def _watch_replay(self, number: int, before: dict[str, Any] | None = None) -> Watched:
        recipe, memory, name = self._recipe, self._recipe.memory, f"replay {number} of {len(self._replay_lives)}"
        assert isinstance(memory, ReplayConfig)
        seed, life = random.key(recipe.seed, random.REPLAY, number), self._replay_lives[number]
        counts = (before["added"], before["drawn"]) if before else (0, 0)
        own = (memory.share(recipe.actors), self._spec, recipe.sampler.num_envs, recipe.total_steps, seed, life, counts)
        return Watched(lambda: self._host.start(ReplayServer, *own, name=name, door=f"{self._run}-replay-{number}"), name)

    # -- watching -------------------------------------------------------------------------------------------------------

    def watch(self) -> Counter[int]:
        """Called often; does not wait. Returns how stale the gradients were that were applied since."""
        stale = Counter[int]()
        for number, server in enumerate(self._servers):
            server.ask("report", REPORT_S)
            server.ask("state", self._config.snapshot_s)
            try:
                self._host.wait(list(server.asked.values()), 0.0)
                taken = server.take()
                stale.update(taken if number == 0 else {})
            except ChildLost as lost:
                self._lives[number] += 1
                snapshot = self._mended(server)
                self._replace(server, lost, f"replaced from its snapshot at update {snapshot['version']:,}")
                self._keep_ledger(number, server, self._lives[number] - 1)
                self._note_beginning(number, snapshot)
                self._servers[number] = self._watch_server(number, snapshot)
            except ChildError as failure:
                raise RunError(f"{server.name} failed; its own traceback:\n{failure}") from None
        if self._chief is not None and (gone := self._look_at(self._chief)):
            self._replace(self._chief, gone, "replaced")
            self._chief = Watched(self._chief.start, self._chief.name)
        for number, replay in enumerate(self._replays):
            if gone := self._look_at(replay):
                self._replay_lives[number] += 1
                self._replace(replay, gone, "replaced by an empty one")
                self._replays[number] = self._watch_replay(number, replay.report)
        return stale

    def _note_beginning(self, number: int, snapshot: dict[str, Any]) -> None:
        """In the ledger: a server that begins in the middle. What a predecessor did after that is lost."""
        if self._config.ledger:
            self._ledger.append({"shard": number, "server_life": self._lives[number], "begins_at": snapshot["version"]})

    def _keep_ledger(self, number: int, server: Watched, life: int) -> None:
        server.ledger.sort(key=lambda row: row["row"])  # answers may overtake each other
        self._ledger += [{"shard": number, "server_life": life, **row} for row in server.ledger]
        server.ledger.clear()

    def take_ledger(self) -> list[dict[str, Any]]:
        """What the servers decided about gradients since the last call."""
        for number, server in enumerate(self._servers):
            self._keep_ledger(number, server, self._lives[number])
        ledger, self._ledger = self._ledger, []
        return ledger

    def open_calls(self) -> list[Future]:
        watched = [*self._servers, *self._replays, *([self._chief] if self._chief is not None else [])]
        return [call for component in watched for call in component.asked.values()]

    def look(self) -> None:
        """The counters as they are now, where those of a moment ago will not do."""
        for server in self._servers:
            with contextlib.suppress(ChildLost, ChildError):  # watch() deals with it
                server.report = server.now("report")
                server.ledger += server.report.pop("ledger", [])

    def pause(self, paused: bool) -> None:
        """While hands are stopping nobody waits for another: not for the gradients of a version, not for a learner's draws."""
        if paused == self._paused:
            return
        self._paused = paused
        if self._chief is not None:
            self._chief.handle.call("pause", paused, timeout_s=SILENT_S)
        for replay in self._replays:
            replay.handle.call("relax", paused, timeout_s=SILENT_S)

    def _look_at(self, component: Watched) -> ChildLost | None:
        component.ask("report", REPORT_S)
        try:
            self._host.wait(list(component.asked.values()), 0.0)
            component.take()
        except ChildLost as lost:
            return lost
        except ChildError as failure:
            raise RunError(f"{component.name} failed; its own traceback:\n{failure}") from None
        return None

    def _mended(self, server: Watched) -> dict[str, Any]:
        """Its snapshot, with the steps that the others were told since."""
        assert server.snapshot is not None
        snapshot = server.snapshot
        table = {learner: {**entry, "steps": dict(entry["steps"])} for learner, entry in snapshot["table"].items()}
        for other in self._servers:
            for learner, lives in other.report.get("told", {}).items():
                if entry := table.get(str(learner)):
                    for life, steps in lives.items():
                        entry["steps"][str(life)] = max(entry["steps"].get(str(life), 0), steps)
        return {**snapshot, "table": table}

    def _replace(self, lost: Watched, reason: ChildLost, how: str) -> None:
        lost.handle.close(time.monotonic())
        if self._restarts_left == 0:
            raise RunError(f"{reason}, and none is to be replaced any more; the last checkpoint is good")
        self._restarts_left -= 1
        self.replaced += 1
        self._warn(f"{reason}; {how}")

    def here(self, learners: list[int]) -> None:
        """Synchronous: a version does not wait for learners that will not come back."""
        self._here = learners
        if self._chief is not None:
            self._chief.handle.call("here", learners, timeout_s=SILENT_S)

    @property
    def clock(self) -> Clock:
        told = self._servers[0].report
        return Clock(told.get("version", 0), told.get("steps", 0))

    def metrics(self) -> dict[str, Any]:
        """Totals of the run, by the servers' own tables."""
        outcomes = self._servers[0].report.get("outcomes", {})
        found: dict[str, Any] = {f"gradients_{name.replace(' ', '_')}": count for name, count in sorted(outcomes.items())}
        self._lost = max(self._lost, *(server.report.get("lost", 0) for server in self._servers))
        found["lost_updates"] = self._lost
        found["replaced_servers"] = self.replaced
        if self._replays:
            told = [replay.report for replay in self._replays if replay.report]
            found["replay_size"] = sum(report["size"] for report in told)
            found["replay_ratio"] = sum(report["drawn"] for report in told) / max(sum(report["added"] for report in told), 1)
        if self._chief is not None and (waits := self._chief.report.get("waits")):
            found["slowest_learner"] = max(waits, key=lambda learner: waits[learner])
            found["waits_s"] = {str(learner): round(wait, 3) for learner, wait in sorted(waits.items())}
            found["waiting_for"] = self._chief.report["waiting_for"]
        return found

    # -- saving ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Of all servers, as they are now; a lost one counts with its snapshot."""
        told = []
        for server in self._servers:
            with contextlib.suppress(ChildLost):  # watch() replaces it
                server.keep(server.now("state"))
            assert server.snapshot is not None
            told.append(server.snapshot)
        vectors = {name: _joined([server["optimiser"][name] for server in told]) for name in self._vectors}
        scalars = {name: torch.stack([torch.tensor(server["optimiser"][name]) for server in told]) for name in self._scalars}
        tables = [{"version": s["version"], "lost": s["lost"], "table": s["table"], "life": life}
                  for s, life in zip(told, self._lives, strict=True)]  # fmt: skip
        return {
            "parameters": _joined([server["parameters"] for server in told]),
            "optimiser": {**vectors, **scalars},
            "updates": told[0]["version"],
            "steps": _steps(told[0]["table"]),
            "servers": tables,
        }

    def _split(self, state: dict) -> list[dict[str, Any]]:
        """What each server begins with. Their number may have changed since the state was saved."""
        snapshots = []
        for number, piece in enumerate(self._pieces):
            known = state["servers"][min(number, len(state["servers"]) - 1)]
            old = min(number, len(state["servers"]) - 1)
            optimiser = {name: state["optimiser"][name][piece].numpy() for name in self._vectors}
            optimiser |= {name: state["optimiser"][name][old].numpy() for name in self._scalars}
            parameters = state["parameters"][piece].numpy()
            about = {name: known[name] for name in ("version", "lost", "table")}
            snapshots.append({"parameters": parameters, "optimiser": optimiser, **about})
        return snapshots

    def close(self) -> None:
        deadline = time.monotonic() + 1.0
        watched = [*self._servers, *self._replays, *([self._chief] if self._chief is not None else [])]
        for component in watched:
            component.handle.hurry()
            component.handle.hang_up()
        for component in watched:
            component.handle.close(deadline)


def initial_state(recipe: Recipe, model: Model) -> dict:
    """As state() would tell it, before any update."""
    memory = recipe.rule.initial_state(model.parameters)
    _, scalars = _names(memory)
    optimiser = {name: x.reshape(1) if name in scalars else x for name, x in memory.items()}
    empty = {"version": 0, "lost": 0, "table": {}, "life": -1}
    return {"parameters": model.parameters, "optimiser": optimiser, "updates": 0, "steps": 0, "servers": [empty]}


def _names(memory: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    return [name for name, x in memory.items() if x.dim()], [name for name, x in memory.items() if not x.dim()]


def _joined(parts: list[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part) for part in parts]))


def _steps(table: dict[str, Any]) -> int:
    return sum(sum(entry["steps"].values()) for entry in table.values())


def _lives(state: dict, servers: int) -> list[int]:
    """A resumed server has a life of its own: what was meant for the old one is refused."""
    return [1 + max(server["life"] for server in state["servers"])] * servers
