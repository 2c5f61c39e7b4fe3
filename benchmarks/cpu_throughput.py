"""manyhands and Stable-Baselines3 on the same machine, one after the other: whole training loops on Pong, steps per second.

Same network (nature), environments, horizon, epochs and minibatches; Stable-Baselines3 with the vector environment that is
faster here. Rounds alternate between the two, so that a noisy machine is noisy for both; the median counts.

    python benchmarks/cpu_throughput.py [--json] [--rounds 3] [--seconds 20] [--only ppo]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from manyhands.bench import machine, train_rate
from manyhands.build import Custom
from manyhands.config import load_recipe

SETTINGS = {
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
}


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    rounds: int = 3
    """How often each is measured."""
    seconds: float = 20.0
    """Length of each measurement, without the warm-up."""
    only: Literal["ppo", "a2c", ""] = ""
    """Measure one algorithm only."""
    kind: Literal["batched", "alternating"] = "batched"
    """manyhands' sampler."""


def measure_manyhands(algorithm: str, seconds: float, kind: str) -> float:
    setting = SETTINGS[algorithm]
    recipe = load_recipe(
        str(setting["recipe"]),
        {
            "device": "cpu",
            "network": {"torso": "nature"},
            "sampler": {**setting["sampler"], "kind": kind, "decorrelate_steps": 0},  # type: ignore[dict-item]
            "memory": setting["memory"],
        },
    )
    return train_rate(recipe, Custom(), seconds)


def measure_sb3(algorithm: str, seconds: float, vector: str) -> float:
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    class Clock(BaseCallback):
        """Starts after the first rollout and its update, stops after `seconds` at the end of one."""

        def __init__(self) -> None:
            super().__init__()
            self.marks: list[tuple[float, int]] = []

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            self.marks.append((time.perf_counter(), self.num_timesteps))

        def over(self) -> bool:
            return len(self.marks) > 2 and self.marks[-1][0] - self.marks[1][0] > seconds

    class StopAtRollout(Clock):
        def _on_step(self) -> bool:
            return not self.over()

    setting = SETTINGS[algorithm]
    sampler, memory = setting["sampler"], setting["memory"]
    n, horizon = sampler["num_envs"], sampler["horizon"]  # type: ignore[index]
    classes = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}
    env = VecFrameStack(make_atari_env(_make_pong, n, seed=0, vec_env_cls=classes[vector]), 4)
    if algorithm == "ppo":
        batch = n * horizon // memory["minibatches"]  # type: ignore[index]
        model = PPO("CnnPolicy", env, n_steps=horizon, n_epochs=memory["epochs"], batch_size=batch, device="cpu")  # type: ignore[index]
    else:
        model = A2C("CnnPolicy", env, n_steps=horizon, device="cpu")
    clock = StopAtRollout()
    model.learn(10**9, callback=clock)
    env.close()
    (t0, s0), (t1, s1) = clock.marks[1], clock.marks[-1]
    return (s1 - s0) / (t1 - t0)


def _make_pong(**options):  # type: ignore[no-untyped-def]
    """In whatever process SB3 makes it; its wrapper skips frames itself."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **options)


def isolated(who: str, *arguments: str) -> float:
    """Each measurement in a fresh process: no allocator, thread pool or emulator is inherited."""
    command = [sys.executable, __file__, "--measure", who, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main(options: Options) -> None:
    result: dict[str, object] = {}
    for algorithm in [options.only] if options.only else list(SETTINGS):
        seconds = str(options.seconds)
        vectors = {v: isolated("sb3", algorithm, seconds, v) for v in ("dummy", "subproc")}
        vector = max(vectors, key=lambda v: vectors[v])
        rates: dict[str, list[float]] = {"manyhands": [], "sb3": []}
        for _ in range(options.rounds):
            rates["manyhands"].append(isolated("manyhands", algorithm, seconds, options.kind))
            rates["sb3"].append(isolated("sb3", algorithm, seconds, vector))
        ours, theirs = (statistics.median(rates[who]) for who in ("manyhands", "sb3"))
        result[algorithm] = {
            "manyhands": round(ours, 1),
            "sb3": round(theirs, 1),
            "ratio": round(ours / theirs, 3),
            "rounds": {who: [round(x, 1) for x in values] for who, values in rates.items()},
            "sb3_vector_env": vector,
        }
        if not options.json:
            print(f"{algorithm}: manyhands {ours:,.0f} steps/s, SB3 {theirs:,.0f} ({vector}), ratio {ours / theirs:.2f}")
    if options.json:
        print(json.dumps({**result, "machine": machine()}))
    else:
        m = machine()
        print(f"on {m['cpu']}, {m['cores']} cores, torch {torch.__version__}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        who, algorithm, seconds, kind = sys.argv[2:]
        measure = {"manyhands": measure_manyhands, "sb3": measure_sb3}[who]
        print(measure(algorithm, float(seconds), kind))
    else:
        main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,)))
