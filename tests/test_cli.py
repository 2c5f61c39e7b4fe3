"""The command line as its users meet it: help, typos, wrong values – one line, exit 2, nothing started."""

import json
import subprocess
import sys

import pytest

from manyhands import cli
from manyhands.config import from_dict, load_recipe, recipe_names, to_dict, to_toml
from manyhands.types import UsageError


def manyhands(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["trian", "snake"], "did you mean 'train'"),
        (["train"], "usage: manyhands train RECIPE"),
        (["train", "snke"], "did you mean 'snake'"),
        (["train", "snake", "--sampler.num-env", "4"], "did you mean '--sampler.num-envs'"),
        (["train", "snake", "--sampler.num-envs", "many"], "--sampler.num-envs"),
        (["train", "snake", "--sampler.num-envs"], "--sampler.num-envs needs a value"),
        (["train", "snake", "--sampler.num-envs", "2.5"], "must be a whole number"),
        (["train", "snake", "--total-steps", "1e6", "--rule.learning-rate", "fast"], "must be a number"),
        (["train", "snake", "--sampler.num-envs", "0"], "at least 1"),
        (["train", "snake", "--sampler.kind", "batchd"], "batched"),
        (["train", "snake", "stray"], "unexpected argument 'stray'"),
        (["train", "snake", "--env.id", "ALE/Pnog-v5"], "did you mean 'ALE/Pong-v5'"),
        (["train", "snake", "--env.id", "Cartpole-v1"], "did you mean 'CartPole-v1'"),
        (["train", "snake", "--env.id", "CartPole-v1"], "choose one of mlp"),
        (["train", "snake", "--network.torso", "natur"], "did you mean 'nature'"),
        (["train", "snake", "--device", "tpu"], "cpu, cuda"),
        (["train", "snake", "--memory.minibatches", "100000"], "exceeds the rollout"),
        (["train", "cartpole-a2c", "--memory.epochs", "3"], "uses a sample once"),
        (["train", "snake", "--total-steps", "0"], "must be at least 1"),
        (["train", "snake", "--memory.prioritized"], "--memory.name replay --algorithm.name dqn would"),
        (["train", "cartpole-dqn", "--double"], "did you mean '--algorithm.double'"),
        (["bench", "cartpole-dqn", "--second", "3"], "did you mean '--seconds'"),
        (["bench", "snake", "--seconds", "0"], "--seconds 0: must be a positive number"),
        (["bench", "snake", "--seconds", "nan"], "--seconds nan: must be a positive number"),
        (["train", "cartpole-dqn", "--memory.n-step", "5000", "--total-steps", "2000"], "it would never learn"),
        (["train", "cartpole-dqn", "--memory.batch", "1000", "--memory.intensity", "0.001"], "it would never learn"),
        (["train", "snake", "--stop-at-return", "abc"], "--stop-at-return abc: must be a number"),
        (["train", "snake", "--algorithm.atoms", "3"], "--algorithm.name categorical-dqn --memory.name replay would"),
        (["train", "cartpole-dqn", "--exploration.spread", "-3"], "exploration.spread = -3"),
        (["train", "pong-rainbow-512", "--algorithm.loss-kind", "squared"], "belongs to algorithm dqn"),
        (["train", "apex-pong", "--memory.capacity", "4e7", "--dry-run"], "lower it"),
        (["train", "cartpole-dqn", "--memory.n-step", "20000"], "memory.n_step = 20000 does not fit"),
        (["train", "cartpole-dqn", "--memory.batch", "200000"], "exceeds memory.capacity"),
        (["train", "cartpole-dqn", "--memory.capacity", "1e15"], "lower it"),
        (["train", "cartpole-dqn", "--memory.device", "cuda"], "memory.device = 'cuda' needs a learner there"),
        (["train", "snake", "--checkpoint.replay", "true"], "no replay to save"),
        (["train", "snake", "--exploration.end", "0.5"], "exploration is for algorithms"),
        (["train", "cartpole-dqn", "--memory.alpha", "0.7"], "needs memory.prioritized"),
        (["train", "cartpole-dqn", "--total-steps", "500"], "would never learn"),
        (["train", "snake", "--topology.learners", "0"], "topology.learners = 0"),
        (["train", "snake", "--topology.pin", "true"], "set topology.learners to at least 2"),
        (["train", "cartpole-a3c", "--store.chunks", "2"], "without locks"),
        (["train", "cartpole-a3c-units", "--store.sync-updates", "2"], "set rule.name = 'adam'"),
        (["train", "cartpole-appo", "--store.chunks", "100000"], "too many for 4675 parameters"),
        (["train", "cartpole-appo", "--store.timeout-s", "3"], "belongs to store allreduce"),
        (["train", "cartpole-async-dqn", "--checkpoint.replay", "true"], "needs a single learner"),
        (["train", "cartpole-dqn", "--sampler.kind", "pipelined"], "value learning has a replay"),
        (["train", "cartpole-ga3c", "--sampler.serve", "9"], "exceeds sampler.num_envs"),
        (["train", "snake", "--sampler.serve", "4"], "for sampler.kind = 'pipelined'"),
        (["train", "cartpole-ga3c", "--sampler.decorrelate-steps", "4"], "drift apart by themselves"),
        (["train", "onpolicy.toml"], "does not fit an on-policy algorithm"),
        (["train", "noreplay.toml"], "learns from a replay"),
        (["train", "missing.toml"], "No such file"),
        (["resume", "nowhere"], "not a run directory"),
        (["eval", "nowhere"], "not a run directory"),
        (["eval", "nowhere", "--episods", "3"], "did you mean '--episodes'"),
        (["eval", "nowhere", "--episodes", "x"], "--episodes"),
        (["plot", "nowhere"], "not a run directory"),
        (["play"], "usage: manyhands play RUN"),
        (["plot"], "usage: manyhands plot RUN"),
        (["train", "snake", "--network.torso", "custom"], "custom network"),
        (["train", "snake", "--threads", "-1"], "threads"),
        (["train", "snake", "--algorithm.gamma", "1.5"], "between 0 and 1"),
        (["train", "snake", "--rule.learning-rate", "nan"], "learning_rate"),
        (["train", "snake", "--run-dir", "/proc/nowhere/run"], "cannot use"),
        (["train", "pong-ppo", "--network.torso", "mlp"], "choose one of nature"),
        (["train", "snake", "--dry-run=maybe"], "switch"),
        (["recipes", "--jsn"], "--json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(capsys, tmp_path, monkeypatch, arguments, needle):
    recipes = tmp_path / "recipes"
    here = tmp_path / "here"
    recipes.mkdir(), here.mkdir()
    (recipes / "onpolicy.toml").write_text('extends = "snake"\n[memory]\nname = "replay"\nprioritized = true\n')
    (recipes / "noreplay.toml").write_text('extends = "snake"\n[algorithm]\nname = "dqn"\n')
    monkeypatch.chdir(here)
    arguments = [str(recipes / word) if (recipes / word).is_file() else word for word in arguments]
    code, out, err = manyhands(capsys, *arguments)
    assert code == 2 and out == ""
    assert needle in err and err.startswith("manyhands: ") and err.count("\n") == 1, err
    assert list(here.iterdir()) == []  # nothing was started


def test_help_and_version(capsys):
    assert manyhands(capsys, "--help")[0] == 0
    for command in cli.COMMANDS:
        code, out, _ = manyhands(capsys, command, "--help")
        assert code == 0 and "usage" in out, command
    code, out, _ = manyhands(capsys, "train", "snake", "--help")
    assert code == 0 and "--sampler.num-envs" in out and "Simulators" in out
    assert manyhands(capsys, "--version")[1].startswith("manyhands ")


def test_dry_run_says_what_would_happen(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = manyhands(capsys, "train", "pong-ppo", "--dry-run", "--sampler.num-envs", "16", "--device", "cpu")
    assert code == 0 and "num_envs = 16" in out and "1,687,719 parameters" in out and "MiB" in out
    assert "sticky_actions = 0.0" in out and "noop_max = 30" in out  # the preset, resolved
    code, out, _ = manyhands(capsys, "train", "snake", "--dry-run", "--json")
    assert json.loads(out)["actions"] == 4
    code, out, _ = manyhands(capsys, "train", "gorila-global-snake", "--dry-run", "--json")
    about = json.loads(out)
    code, out, _ = manyhands(capsys, "train", "snake-dqn", "--dry-run", "--json", "--checkpoint.replay")
    whole = json.loads(out)
    assert about["replay_servers"] == 2 and whole["checkpoint_replays"] == 4
    sizes = [x["recipe"]["memory"]["capacity"] for x in (about, whole)]
    assert 2 * about["replay_bytes"] / whole["replay_bytes"] == pytest.approx(sizes[0] / sizes[1], rel=0.1)
    assert list(tmp_path.iterdir()) == []


def test_reading_recipes_does_not_need_ale_py():
    code = "import sys; sys.modules['ale_py'] = None; from manyhands.cli import main; main(['recipes'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_recipes_are_listed_with_descriptions(capsys):
    code, out, _ = manyhands(capsys, "recipes", "--json")
    listed = {r["name"]: r["description"] for r in json.loads(out)}
    assert code == 0 and all(listed.values())
    wanted = {
        "snake",
        "cartpole-ppo",
        "cartpole-a2c",
        "pong-ppo",
        "breakout-ppo",
        "pong-a2c",
        "paac-pong",
        "paac-nature-pong",
    }
    assert wanted <= set(listed)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_a_round_trip(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    (tmp_path / "copy.toml").write_text(to_toml(recipe))
    assert load_recipe(str(tmp_path / "copy.toml")) == recipe
    assert from_dict(to_dict(recipe)) == recipe


def test_paac_has_the_papers_numbers():
    for name, torso in (("paac-pong", "nips"), ("paac-nature-pong", "nature")):
        r = load_recipe(name)
        assert (r.sampler.num_envs, r.sampler.horizon, r.total_steps) == (32, 5, 115_000_000)
        assert (r.rule.learning_rate, r.rule.decay, r.rule.epsilon, r.rule.max_grad_norm) == (0.0224, 0.99, 0.1, 40.0)
        assert (r.algorithm.entropy_coef, r.algorithm.gamma, r.network.torso) == (0.01, 0.99, torso)


def test_files_extend_and_unknown_keys_fail(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "pong-ppo"\n[sampler]\nnum_envs = 3\nkind = "batched"\n')
    recipe = load_recipe(str(mine))
    assert recipe.name == "mine" and recipe.sampler.num_envs == 3 and recipe.sampler.horizon == 64
    for text, message in [
        ("[sampler]\nnum_env = 3", "unknown key sampler.num_env; did you mean 'num_envs'"),
        ('[sampler]\nnum_envs = "3"', "must be a whole number"),
        ("[sampler]\nnum_envs = true", "must be a whole number"),
        ('[algorithm]\nname = "pppo"', "did you mean 'ppo'"),
        ("total_steps = ", "not valid TOML"),
        ('algorithm = "ppo"', "must be a table"),
        ("[env]\nid = 5", "must be a table"),
        ("extends = 5", "must be the name"),
        (f'extends = "{mine}"', "extends itself"),
    ]:
        mine.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_recipe(str(mine))


def test_overrides_reach_every_level(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--sampler.num-envs=4",
        "--rule.learning_rate",
        "1e-4",
        "--network.hidden",
        "32",
        "--algorithm.normalise-advantage",
        "false",
        "--seed",
        "9",
    ]
    code, out, _ = manyhands(capsys, "train", "snake", "--dry-run", "--json", *flags)
    recipe = json.loads(out)["recipe"]
    assert code == 0 and recipe["sampler"]["num_envs"] == 4 and recipe["rule"]["learning_rate"] == 1e-4
    assert recipe["network"]["hidden"] == [32] and recipe["algorithm"]["normalise_advantage"] is False and recipe["seed"] == 9


def test_a_run_from_end_to_end(tmp_path):
    """train, eval, play, plot, bench: exit 0 and the files are there."""

    def call(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "manyhands", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("train", "snake", "--total-steps", 9000, "--report.every-steps", 2000)
    run = tmp_path / "runs" / "snake-0"
    assert list((run / "tensorboard").iterdir())
    assert json.loads(call("eval", run, "--episodes", 5, "--json"))["episodes"] == 5
    assert "greedy" in call("eval", run, "--episodes", 40, "--actions", "greedy", "--checkpoint", "best")
    assert len(list((run / "eval").glob("*.json"))) == 2
    for name in ("clip.gif", "clip.mp4"):
        call("play", run, "--video", name, "--max-steps", 30)
        assert (tmp_path / name).stat().st_size > 1000
    call("plot", run, "--out", "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    result = json.loads(call("bench", "snake", "--seconds", 1, "--json"))
    assert abs(sum(result["time"].values()) - 1) < 0.01 and result["simulator_only_steps_per_s"] > 0


def test_kinds_are_chosen_by_name():
    from manyhands.config import load_recipe
    from manyhands.flags import override
    from manyhands.stores.chunks import SharedConfig
    from manyhands.stores.rules import RMSProp

    words = [
        "--store.name",
        "shared",
        "--store.chunks=2",
        "--topology.learners",
        "2",
        "--rule.name",
        "rmsprop",
        "--rule.decay",
        "0.9",
    ]
    recipe = override(load_recipe("cartpole-ppo"), words, "manyhands train")
    assert recipe.store == SharedConfig(chunks=2) and recipe.rule == RMSProp(decay=0.9) and recipe.topology.learners == 2
    same = override(load_recipe("cartpole-appo"), ["--store.name", "shared"], "manyhands train")
    assert same.store == load_recipe("cartpole-appo").store
    with pytest.raises(UsageError, match="no such store; did you mean 'shared'"):
        override(load_recipe("cartpole-ppo"), ["--store.name", "shard"], "manyhands train")
    with pytest.raises(UsageError, match=r"--store.name shared would"):
        override(load_recipe("cartpole-ppo"), ["--store.chunks", "2"], "manyhands train")


def test_groups_divide_the_simulators():
    from manyhands.build import group_sizes

    def sizes(**sampler):
        return group_sizes(load_recipe("pong-ppo", {"sampler": sampler}))

    assert sizes(num_envs=8, groups=3) == [3, 3, 2] and sizes(num_envs=5) == [3, 2]
    assert sizes(num_envs=3, kind="serial") == [1, 1, 1] and sizes(num_envs=3, kind="batched") == [3]
    for wrong in ({"num_envs": 2, "groups": 3}, {"kind": "batched", "groups": 2}, {"groups": -1}):
        with pytest.raises(UsageError, match="group"):
            sizes(**wrong)
