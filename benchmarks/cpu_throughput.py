"""manyhands and Stable-Baselines3 on the same machine: whole training loops on Pong, steps per second.

Same network (nature), environments, horizon, epochs and minibatches; Stable-Baselines3 with the vector environment that is
faster here. Each trains in a process of its own, and they take turns of a few seconds: a machine that is noisy for minutes is
noisy for both. The rates are medians over the turns, the ratio is theirs.

    python benchmarks/cpu_throughput.py [--json] [--turns 10] [--seconds 4] [--only ppo]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, TextIO

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "recipe": "pong-ppo",
        "sampler": {"num_envs": 8, "horizon": 128},
        "memory": {"epochs": 4, "minibatches": 4},
    },
    "a2c": {
        "recipe": "pong-a2c",
        "sampler": {"num_envs": 16, "horizon": 5},
        "memory": {"epochs": 1, "minibatches": 1},
    },
    "dqn": {  # 32 transitions learned from every 4 steps: each is used 8 times
        "recipe": "pong-dqn",
        "sampler": {"num_envs": 8, "horizon": 4},
        "memory": {"capacity": 20_000, "batch": 32, "intensity": 8.0, "warmup_steps": 1000},
    },
}
WARMED_UP = 1500  # steps after which a turn may begin


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    turns: int = 10
    """How often each is measured."""
    seconds: float = 4.0
    """Length of a turn; it ends with the rollout and the updates under way then."""
    only: Literal["ppo", "a2c", "dqn", ""] = ""
    """Measure one algorithm only."""
    kind: Literal["batched", "alternating"] = "batched"
    """manyhands' sampler."""
    bf16: bool = False
    """manyhands computes the network in bfloat16 (its setting `bf16`; Stable-Baselines3 has none and stays in 32 bits)."""


class Turns:
    """In the process that trains: waits for a turn, counts steps until its time is over, tells the rate, waits again."""

    def __init__(self, seconds: float, answers: TextIO) -> None:
        self._seconds, self._answers = seconds, answers
        self._began: tuple[float, int] | None = None

    def rollout_over(self, steps: int) -> None:
        now = time.perf_counter()
        if self._began is not None and now - self._began[0] < self._seconds:
            return
        rate = 0.0 if self._began is None else (steps - self._began[1]) / (now - self._began[0])
        print(rate, file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._began = (time.perf_counter(), steps)


def train_manyhands(algorithm: str, variant: str, turns: Turns) -> None:
    from manyhands.build import Custom, make_learner
    from manyhands.config import load_recipe

    setting = SETTINGS[algorithm]
    kind, _, precision = variant.partition("+")
    changes = {
        "device": "cpu",
        "bf16": precision == "bf16",
        "network": {"torso": "nature"},
        "sampler": {**setting["sampler"], "kind": kind, "decorrelate_steps": 0},
        "memory": setting["memory"],
    }
    learner = make_learner(load_recipe(setting["recipe"], changes), Custom())
    for rollout in learner.run():
        if rollout is not None and learner.clock.steps > WARMED_UP:
            turns.rollout_over(learner.clock.steps)


def train_sb3(algorithm: str, vector: str, turns: Turns) -> None:
    from stable_baselines3 import A2C, DQN, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    class TakeTurns(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps > WARMED_UP:
                turns.rollout_over(self.num_timesteps)

    setting = SETTINGS[algorithm]
    sampler, memory = setting["sampler"], setting["memory"]
    n, horizon = sampler["num_envs"], sampler["horizon"]
    vectors = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}
    env = VecFrameStack(make_atari_env(_make_pong, n, seed=0, vec_env_cls=vectors[vector]), 4)
    model: Any
    if algorithm == "ppo":
        batch = n * horizon // memory["minibatches"]
        model = PPO("CnnPolicy", env, n_steps=horizon, n_epochs=memory["epochs"], batch_size=batch, device="cpu")
    elif algorithm == "a2c":
        model = A2C("CnnPolicy", env, n_steps=horizon, device="cpu")
    else:
        updates = round(n * memory["intensity"] / memory["batch"])  # after one step of every environment
        model = DQN(
            "CnnPolicy",
            env,
            buffer_size=memory["capacity"],
            batch_size=memory["batch"],
            learning_starts=memory["warmup_steps"],
            train_freq=1,
            gradient_steps=updates,
            device="cpu",
        )
    model.learn(10**9, callback=TakeTurns())


def _make_pong(**options):  # type: ignore[no-untyped-def]
    """In whatever process SB3 makes it; its wrapper skips frames itself."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **options)


class Contender:
    """A process that trains when asked: no allocator, thread pool, emulator or environment variable is shared with another
    one (importing manyhands sets under which runtime torch's threads run and how long they spin; Stable-Baselines3 is measured
    as its users have it)."""

    def __init__(self, who: str, algorithm: str, variant: str, seconds: float) -> None:
        from manyhands import machine

        command = [sys.executable, __file__, "--train", who, algorithm, variant, str(seconds)]
        environment = {name: value for name, value in os.environ.items() if name not in machine.BRIEFLY}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._answer()  # it has learned from a first rollout

    def turn(self) -> float:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._process.args[3:])} ended: see above")  # type: ignore[index]
        return float(line)

    def close(self) -> None:
        self._process.communicate()


def compare(algorithm: str, options: Options) -> dict[str, Any]:
    candidates = {vector: Contender("sb3", algorithm, vector, options.seconds) for vector in ("dummy", "subproc")}
    trial: dict[str, list[float]] = {vector: [] for vector in candidates}
    for _ in range(2):
        for vector, contender in candidates.items():
            trial[vector].append(contender.turn())
    chosen = max(trial, key=lambda vector: max(trial[vector]))
    sb3 = candidates.pop(chosen)
    for other in candidates.values():
        other.close()
    variant = options.kind + ("+bf16" if options.bf16 else "")
    contenders = {"manyhands": Contender("manyhands", algorithm, variant, options.seconds), "sb3": sb3}
    rates: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(options.turns):
        for who, contender in contenders.items():
            rates[who].append(contender.turn())
    for contender in contenders.values():
        contender.close()
    medians = {who: statistics.median(values) for who, values in rates.items()}
    return {
        **{who: round(rate, 1) for who, rate in medians.items()},
        "ratio": round(medians["manyhands"] / medians["sb3"], 3),
        "turns": {who: [round(x, 1) for x in values] for who, values in rates.items()},
        "sb3_vector_env": chosen,
        "precision": "bf16" if options.bf16 else "float32",
    }


def openmp() -> str:
    """Under which runtime manyhands lets torch's threads run: Intel's where it is installed (manyhands[cpu])."""
    try:
        return f"intel-openmp {importlib.metadata.version('intel-openmp')}"
    except importlib.metadata.PackageNotFoundError:
        return "torch's own"


def main(options: Options) -> None:
    from manyhands import machine

    result: dict[str, Any] = {}
    for algorithm in [options.only] if options.only else list(SETTINGS):
        result[algorithm] = row = compare(algorithm, options)
        if not options.json:
            print(
                f"{algorithm}: manyhands {row['manyhands']:,.0f} steps/s{' in bf16' if options.bf16 else ''}, "
                f"SB3 {row['sb3']:,.0f} ({row['sb3_vector_env']}), ratio {row['ratio']:.2f}"
            )
    if options.json:
        print(json.dumps({**result, "machine": machine.describe(), "openmp": {"manyhands": openmp(), "sb3": "torch's own"}}))
    else:
        m = machine.describe()
        print(f"on {m['cpu']}, {m['cores']} cores, torch {m['torch']}, OpenMP of manyhands: {openmp()}; of SB3: torch's own")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        who, algorithm, variant, seconds = sys.argv[2:]
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the libraries print is no answer
        {"manyhands": train_manyhands, "sb3": train_sb3}[who](algorithm, variant, Turns(float(seconds), answers))
    else:
        from script import run

        run(main, Options, __doc__)
