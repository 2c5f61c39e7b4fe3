"""The planner on cases whose answer is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from manyhands import cli
from manyhands.config import load_recipe
from manyhands.plan.events import Queue, Shared, Simulation, all_of
from manyhands.plan.measure import shorter
from manyhands.plan.model import Costs, Machines, Measured, Topology, closed_form, slower
from manyhands.plan.recommend import recommend
from manyhands.plan.recommend import show as show_advice
from manyhands.plan.show import draw, plan, show, topology_of
from manyhands.plan.simulation import simulate
from manyhands.types import UsageError

# One step a rollout, one update a rollout, T = 100 ms with the rollout, τ = 10 ms; nothing is moved, nothing is random.
EXACT = Measured("snake-downpour", 1000, 1.0, 1.0, (Costs(1, 0.04, 0.06),), 0.01, 0.0, (), (), 2**20, 0, 2, "a CPU")
FAR = Machines(cores=1, learners_each=1)  # a machine each, a network without limits


def when(simulation, requests):
    times = {}
    for name, request in requests.items():
        request(lambda name=name: times.update({name: simulation.now}))
    simulation.run(lambda: False)
    return times


@pytest.mark.parametrize(
    ("capacity", "seconds", "expected"),
    [
        (2, (1, 1), (1, 1)),  # a core each
        (1, (1, 1), (2, 2)),  # half a core each
        (1, (1, 3), (2, 4)),  # together until 2, then alone
        (2, (1, 1, 1, 1), (2, 2, 2, 2)),
        (1, (0, 1), (0, 1)),
    ],
)
def test_cores_are_shared(capacity, seconds, expected):
    simulation = Simulation()
    cores = Shared(simulation, capacity)
    times = when(simulation, {i: cores.use(s) for i, s in enumerate(seconds)})
    assert [times[i] for i in range(len(seconds))] == pytest.approx(expected)
    assert cores.used == pytest.approx(sum(seconds))


def test_cores_that_are_shared_lose_some_of_their_work():
    simulation = Simulation()
    cores = Shared(simulation, 1, crowding=1.2)
    # Two share it until 2.4, when one is done; the other has a second left and the core to itself.
    assert when(simulation, {"short": cores.use(1), "long": cores.use(2)}) == pytest.approx({"short": 2.4, "long": 3.4})
    assert [slower(crowd, 1.2) for crowd in (0.5, 1, 1.5, 2, 4)] == pytest.approx([1, 1, 1.65, 2.4, 4.8])


def test_who_uses_two_cores_leaves_none():
    simulation = Simulation()
    cores = Shared(simulation, 2)
    # Together they want three of two cores: both take half as long again, until the second is done at 1.5.
    assert when(simulation, {"two": cores.use(2, 2), "one": cores.use(1, 1)}) == pytest.approx({"one": 1.5, "two": 2.5})


def test_a_queue_serves_one_after_the_other():
    simulation = Simulation()
    queue = Queue(Shared(simulation, 4))
    assert when(simulation, {i: queue.serve(s) for i, s in enumerate((1, 2, 3))}) == pytest.approx({0: 1, 1: 3, 2: 6})
    simulation = Simulation()
    queues = [Queue(Shared(simulation, 1)) for _ in range(2)]
    assert when(simulation, {"both": all_of([queues[0].serve(1), queues[1].serve(5)])}) == pytest.approx({"both": 5})


@pytest.mark.parametrize(("learners", "expected"), [(1, 1 / 0.11), (2, 2 / 0.11), (8, 8 / 0.11), (40, 1 / 0.01)])
def test_updates_grow_with_the_learners_up_to_the_bend(learners, expected):
    """T/τ = 10: then the server is busy all the time."""
    told = simulate(EXACT, Topology("asynchronous", learners), FAR)
    assert told["updates_per_s"] == pytest.approx(expected, rel=0.03)
    assert told["steps_per_s"] == pytest.approx(expected, rel=0.03)
    formula = closed_form(EXACT, Topology("asynchronous", learners), FAR)
    assert formula["bend"] == pytest.approx(10) and formula["bottleneck"] == ("servers" if learners > 10 else "learners")
    assert told["bottleneck"] == ("servers" if learners > 10 else "the learners' own work")


def test_staleness_is_the_number_of_the_others():
    told = simulate(EXACT, Topology("asynchronous", 6), FAR)
    assert sum(k * share for k, share in told["staleness"].items()) == pytest.approx(5, abs=0.1)


def test_more_shards_move_the_bend():
    told = simulate(EXACT, Topology("asynchronous", 40, shards=4), FAR)
    assert told["updates_per_s"] == pytest.approx(40 / 0.1025, rel=0.05)  # 2.5 ms on each of four: the bend is at 40


def test_learners_that_share_cores_get_no_more_done():
    one, four = (simulate(EXACT, Topology("asynchronous", n), Machines(cores=1)) for n in (1, 4))
    assert four["steps_per_s"] == pytest.approx(one["steps_per_s"], rel=0.03)
    assert four["bottleneck"] == "cores" and four["busy"]["cores"] == pytest.approx(1, abs=0.01)


def test_a_version_waits_for_all_or_for_the_fastest():
    alike = simulate(EXACT, Topology("synchronous", 8, gather=8), FAR)
    assert alike["updates_per_s"] == pytest.approx(1 / 0.11, rel=0.02) and alike["late"] == 0
    uneven = replace(EXACT, costs=(Costs(1, 0.04, 0.06, spread=0.5),))
    everybody, most = (simulate(uneven, Topology("synchronous", 32, gather=k), FAR) for k in (32, 26))
    assert most["updates_per_s"] > 1.2 * everybody["updates_per_s"] and most["late"] > 0.05
    # n learners, each with a lognormal time of its own: the last of 32 comes late, and a version is made when it does.
    assert everybody["updates_per_s"] < 0.6 * alike["updates_per_s"]


def test_ranks_wait_for_each_other():
    told = simulate(EXACT, Topology("allreduce", 4), FAR)
    assert told["updates_per_s"] == pytest.approx(1 / 0.11, rel=0.02) and told["steps_per_s"] == pytest.approx(4 / 0.11, rel=0.02)


def test_a_slow_network_is_the_limit():
    slow = Machines(cores=1, learners_each=1, bytes_per_s=4000 / 0.05)  # the vector takes 50 ms, one way
    told = simulate(EXACT, Topology("asynchronous", 8), slow)
    assert told["updates_per_s"] == pytest.approx(1 / 0.1, rel=0.05) and told["bottleneck"] == "servers' network"
    assert closed_form(EXACT, Topology("asynchronous", 8), slow)["updates_per_s"] == pytest.approx(10)


def test_a_recipe_with_other_numbers_of_learners(tmp_path):
    assert topology_of(load_recipe("snake-downpour"), 7) == Topology("asynchronous", 7, 1, 0)
    synchronous = load_recipe("ba3c-snake", {"store": {"gather": 9}, "topology": {"learners": 10}})
    assert topology_of(synchronous, 64).gather == 58
    told = plan(EXACT, load_recipe("snake-downpour"), [1, 4], Machines(cores=2), 1e6)
    assert "asynchronous" in show(told) and told["rows"][1]["bytes_per_machine"] == 4 * 2**20
    assert told["rows"][0]["hours"] == pytest.approx(1e6 / told["rows"][0]["steps_per_s"] / 3600)
    draw(told, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_what_was_measured_elsewhere_is_read(tmp_path, capsys):
    EXACT.save(tmp_path / "there.json")
    assert Measured.load(tmp_path / "there.json") == EXACT
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(UsageError, match="not what"):
        Measured.load(tmp_path / "torn.json")
    assert cli.plan(["snake-downpour", "--measured", str(tmp_path / "there.json"), "--learners", "1,16", "--json"]) == 0
    assert [row["learners"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 16]
    with pytest.raises(UsageError, match="measured for snake-downpour"):
        cli.plan(["cartpole-ppo", "--measured", str(tmp_path / "there.json")])


def test_a_recipe_is_measured_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("manyhands.plan.measure.SECONDS", 0.5)
    monkeypatch.setattr("manyhands.plan.meetings.SECONDS", 0.2)
    assert cli.plan(["cartpole-ppo", "--learners", "1,2", "--save", str(tmp_path / "here.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    here = Measured.load(tmp_path / "here.json")
    assert 0 < here.update_s < 0.05 and all(c.rollout_s > 0 and c.gradient_s > 0 for c in here.costs)
    sampler = load_recipe("cartpole-ppo").sampler
    assert here.steps_per_rollout == pytest.approx(sampler.num_envs * sampler.horizon, rel=0.1)
    assert told["rows"][0]["steps_per_s"] > 0


def test_what_is_faster_is_recommended():
    """A machine that likes two groups and many environments, and on which nothing else matters."""
    recipe = load_recipe("cartpole-ppo", {"device": "cpu"})

    def speed(tried):
        return 100.0 * (1.5 if tried.sampler.kind == "alternating" else 1.0) * tried.sampler.num_envs**0.5

    advice = recommend(recipe, lambda line: None, speed)
    best = ["--sampler.kind", "alternating", "--sampler.num-envs", str(4 * recipe.sampler.num_envs)]
    assert advice["flags"] == best and advice["times"] == pytest.approx(3.0) and not advice["learns_the_same"]
    assert "manyhands train cartpole-ppo --sampler.kind alternating" in show_advice(advice)
    assert recommend(recipe, lambda line: None, lambda tried: 100.0)["flags"] == []


def test_a_replay_of_the_recommended_recipe_is_placed():
    recipe = load_recipe("cartpole-dqn", {"device": "cpu"})
    advice = recommend(recipe, lambda line: None, lambda tried: float(tried.memory.batch))
    assert advice["flags"] == ["--memory.batch", str(4 * recipe.memory.batch)] and advice["replay_device"] == "cpu"
    assert "goes to cpu" in show_advice(advice)


def test_larger_batches_move_the_bend():
    """T is 40 + 4·60 ms then, and the servers have a quarter of the updates to do."""
    result = plan(EXACT, load_recipe("snake-downpour"), [1, 100], FAR, 1e6)
    assert result["bend"] == pytest.approx(10) and result["larger_batch"]["bend"] == pytest.approx(40)
    one, many = result["rows"]
    assert one["larger_batch_steps_per_s"] == pytest.approx(4 / (0.16 + 0.24 + 0.01), rel=0.02)
    assert many["larger_batch_steps_per_s"] == pytest.approx(4 * 100, rel=0.02)  # 100 updates/s, of four steps each
    assert many["steps_per_s"] == pytest.approx(100, rel=0.02)
    assert "batches 4 times as large: 400 steps/s" in show(result)


def test_all_reduce_has_no_servers_network():
    """Each machine sends and receives its vector twice, at the same time as the others: 64 of them need no longer than two."""
    measured = replace(EXACT, parameters=1_000_000)
    far = replace(FAR, bytes_per_s=1e9)
    for n in (2, 64):
        found = closed_form(measured, Topology("allreduce", n), far)
        assert set(found["limits"]) == {"learners"} and found["steps_per_s"] == pytest.approx(n / (0.1 + 0.01 + 0.008))


def test_on_one_machine_the_cores_are_the_bend():
    alone, shared = (closed_form(EXACT, Topology("asynchronous", 16), machines)["bend"] for machines in (FAR, Machines(2)))
    assert alone == pytest.approx(10) and shared == pytest.approx(2)


def test_a_replay_is_divided_among_the_learners():
    measured = replace(EXACT, bytes_per_learner=100, replay_bytes=1000)
    rows = plan(measured, load_recipe("snake-downpour"), [1, 4], Machines(2), 1e6)["rows"]
    assert [row["bytes_per_machine"] for row in rows] == [1100, 1400]


def test_long_rollouts_are_measured_in_parts():
    recipe = load_recipe("pong-ppo", {"device": "cpu"})
    part, times = shorter(recipe)
    whole = recipe.sampler.num_envs * recipe.sampler.horizon
    assert part.sampler.num_envs * part.sampler.horizon * times == whole
    assert part.memory.minibatches * times == recipe.memory.minibatches
    assert times == 8 and shorter(load_recipe("cartpole-ppo", {"device": "cpu"}))[1] == 1


def test_a_gpu_is_shared():
    """Networks take 80 of 100 ms: one GPU is busy with two learners, two with three."""
    costs = (Costs(1, 0.04, 0.06, act_s=0.02),)
    for gpus, most in ((1, 12.5), (2, 25.0)):
        measured = replace(EXACT, costs=costs, update_s=1e-4, gpus=gpus)
        four = simulate(measured, Topology("asynchronous", 4), Machines(4))
        assert four["updates_per_s"] == pytest.approx(most, rel=0.02) and four["bottleneck"] == "GPUs"
        formula = closed_form(measured, Topology("asynchronous", 4), Machines(4))
        assert formula["updates_per_s"] == pytest.approx(most) and formula["bottleneck"] == "GPUs"
    told = plan(replace(EXACT, costs=costs), load_recipe("snake-downpour"), [1], FAR, 1e6)
    assert "acting 20% (alone 50 steps/s), gradients 60% (alone 17 steps/s)" in show(told)
