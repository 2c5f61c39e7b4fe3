"""What is captured on a GPU is what runs kernel by kernel; here, that the captured form of an update is the ordinary one."""

import gc
from contextlib import nullcontext

import pytest
import torch

from manyhands.actor import Actor
from manyhands.build import Custom, Meeting, make_learner, place_threads
from manyhands.config import load_recipe
from manyhands.graphs import Captured
from manyhands.hosts.process import SharedBlock
from manyhands.nets.flat import flatten
from manyhands.stores.gate import PATIENCE
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import Adam, RMSProp
from manyhands.types import GradientInfo, RunError
from tests.gpu import DEVICES, GPU, REAL

SOFTWARE = pytest.mark.skipif(REAL, reason="about the GPU in software")
AUTOCAST = pytest.mark.skipif(not REAL, reason="autocast knows real GPUs only")
RULES = [
    Adam(learning_rate=0.01, max_grad_norm=0.5),
    RMSProp(learning_rate=0.01, epsilon_inside=True, anneal="linear"),
    Adam(learning_rate=0.01, max_average_norm=0.001),
]


def store_on(device, rule):
    torch.manual_seed(0)
    model = flatten(torch.nn.Linear(7, 5).to(device))
    store = LocalStore(model, rule, 1000)
    if store._captured is None:
        store._captured = store._apply  # the same, not captured
    return store


NAN, INF = float("nan"), float("inf")


def steps(store, poison=None, count=12):
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        store.count(30)
        gradient = torch.randn(40, generator=generator)
        if i in (poison or {}):
            gradient[3] = poison[i]
        store.model.gradient.copy_(gradient)
        receipt = store.step(GradientInfo(i, 32))
    if store.model.parameters.is_cuda:
        torch.cuda.synchronize()
    return store.model.parameters.cpu().clone(), receipt


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=["adam", "rmsprop", "average-norm"])
def test_updates_without_waiting_equal_ordinary_ones(device, rule):
    torch.manual_seed(0)
    reference = LocalStore(flatten(torch.nn.Linear(7, 5)), rule, 1000)
    expected, receipt = steps(reference)
    found, other = steps(store_on(device, rule))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert receipt.clock == other.clock
    assert float(other.metrics["gradient_norm"]) == pytest.approx(float(receipt.metrics["gradient_norm"]), rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES, ids=["adam", "rmsprop", "average-norm"])
def test_what_is_not_finite_is_left_out_without_waiting(device, rule):
    torch.manual_seed(0)
    reference = LocalStore(flatten(torch.nn.Linear(7, 5)), rule, 1000)
    expected, _ = steps(reference, poison={4: NAN, 5: INF, 9: -INF})
    store = store_on(device, rule)
    found, _ = steps(store, poison={4: NAN, 5: INF, 9: -INF})
    assert store.refused == reference.refused == 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, tensor in reference._shard.memory.items():
        torch.testing.assert_close(store._shard.memory[name].cpu(), tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_ends_when_gradients_in_a_row_are_not_finite(device):
    now_and_then = {i: NAN for i in range(2 * PATIENCE) if i % 4}
    store = store_on(device, RULES[0])
    steps(store, now_and_then, 2 * PATIENCE)
    assert store.refused == len(now_and_then) > PATIENCE
    with pytest.raises(RunError, match=f"{PATIENCE} gradients in a row"):
        steps(store_on(device, RULES[0]), dict.fromkeys(range(3 * PATIENCE), INF), 3 * PATIENCE)


REPLAYING = ["pong-dqn-512", "pong-categorical-2048", "pong-rainbow-512"]


def small(name, **changes):
    """A recipe, or a way of using one, on a GPU with little to do. The schedules go down quickly."""
    changes = {"device": "cuda", "total_steps": 400, "sampler": {"num_envs": 4, "horizon": 8, "decorrelate_steps": 0}, **changes}
    if name in REPLAYING:
        changes["memory"] = {"capacity": 2000, "batch": 16, "warmup_steps": 64}
    elif name == "remembered elsewhere":
        name, changes["memory"] = "pong-rainbow-512", {"capacity": 2000, "batch": 16, "warmup_steps": 64, "device": "cpu"}
    elif name == "overlapped":
        name, changes["memory"] = "pong-ppo", {"epochs": 2, "minibatches": 3, "overlap": True}  # of two sizes
        changes["algorithm"] = {"clip": 0.05, "clip_anneal": True, "entropy_anneal": True}
    elif name == "pong-ga3c":
        changes["sampler"] = {"num_envs": 4, "serve": 4, "horizon": 8, "pieces": 4}
    elif name == "breakout-fast":
        changes |= {"env": {"workers": 0}, "memory": {"minibatches": 2}}
    elif name == "snake-gpu":
        changes["memory"] = {"epochs": 2, "minibatches": 3}
    return load_recipe(name, changes)


def trained(recipe, updates):
    learner = make_learner(recipe, Custom())
    first = learner.model.parameters.cpu().clone()
    try:
        for _ in learner.run():
            if learner.clock.updates >= updates:
                break
        return learner.clock, learner.model.parameters.cpu() - first, learner.sums.take()
    finally:
        learner.close()


@GPU
@pytest.mark.parametrize(
    "name",
    ["pong-a2c", "pong-ppo", "overlapped", "pong-ga3c", "breakout-fast", "snake-gpu", *REPLAYING, "remembered elsewhere"],
)
def test_captured_training_equals_training_kernel_by_kernel(name):
    """Three updates: longer, rounding changes an action, and with it everything that follows."""
    clock, captured, metrics = trained(small(name), 3)
    clock_too, eager, expected = trained(small(name, graphs=False), 3)
    assert clock == clock_too and metrics.keys() == expected.keys()
    # Where a gradient is next to nothing Adam steps by its sign, which rounding decides. An update left out would be a third.
    assert (captured - eager).norm() < 0.15 * eager.norm()
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=1e-3)


@GPU
def test_no_garbage_is_collected_while_a_graph_is_captured(gpu):
    """Where an older graph is among it, CUDA ends the process."""
    device = torch.device("cuda")
    x, calls = torch.zeros(3, device=device), []
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    old = Captured(lambda: x.add_(1), device)
    old()
    kept = [(old, circle := [])]
    circle.append(kept[0])
    del old, circle

    def wasteful():
        calls.append(0)
        if len(calls) == 3:  # this is the call that is captured
            kept.clear()
            gc.set_threshold(10)
        for _ in range(100):
            circle = []
            circle.append(circle)
        return x.add_(1)

    try:
        Captured(wasteful, device)()
    finally:
        gc.set_threshold(*before)
    assert len(calls) == 3 and (gpu is None or not gpu.spoilt)
    assert x.tolist() == [6, 6, 6]


@GPU
@SOFTWARE
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["pong-a2c", "pong-ppo", "overlapped", "snake-gpu"])
def test_an_asynchronous_device_computes_what_a_cpu_does(name, graphs):
    """Longer than on a real GPU, which rounds in its own way."""
    clock, found, metrics = trained(small(name, graphs=graphs), 24)
    clock_too, expected, same = trained(small(name, device="cpu"), 24)
    assert clock == clock_too and metrics.keys() == same.keys()
    assert (found - expected).norm() < 0.02 * expected.norm()  # an update left out would be twice that
    for key, value in same.items():
        assert metrics[key] == pytest.approx(value, rel=0.01, abs=1e-4), key


@GPU
@pytest.mark.parametrize("name", ["pong-a2c", "overlapped", "pong-rainbow-512", "snake-gpu"])
def test_the_same_seed_gives_the_same_run_on_a_gpu(name):
    (clock, parameters, _), (clock_too, same, _) = (trained(small(name), 40 if REAL else 4) for _ in range(2))
    assert clock == clock_too and torch.equal(parameters, same)


@GPU
@SOFTWARE
def test_what_was_captured_is_launched_on_its_own_gpu(monkeypatch):
    device, entered = torch.device("cuda", 0), []
    x = torch.zeros(3, device=device)
    captured = Captured(lambda: x.add_(1), device, changes=[x])
    captured()
    monkeypatch.setattr(torch.cuda, "device", lambda which: entered.append(which) or nullcontext())
    captured()
    assert entered == []  # it is the current one
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    captured()
    assert entered == [device] and x.tolist() == [3, 3, 3]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_recipe_says_whether_convolutions_are_deterministic(deterministic):
    place_threads(load_recipe("cartpole-ppo", {"deterministic": deterministic}), torch.device("cpu"))
    assert torch.backends.cudnn.deterministic is deterministic


@GPU
@SOFTWARE
@pytest.mark.parametrize("name", ["pong-a2c", "pong-ppo", "overlapped", "pong-ga3c", "pong-appo", "snake-gpu", *REPLAYING])
def test_nobody_waits_for_a_gpu_but_for_actions(name, gpu):
    recipe = small(name)
    shared = name == "pong-appo"
    blocks = [SharedBlock(), SharedBlock()] if shared else []
    learner = make_learner(recipe, Custom(), meeting=Meeting(tuple(block.fd for block in blocks)))
    if shared:
        learner.store.load(learner.store.initial_state())
    try:
        rollouts = (item for item in learner.run() if item is not None)
        while learner.clock.updates < 8:  # by now everything is captured
            next(rollouts)
        before, updates = gpu.waits, learner.clock.updates
        for _ in range(5):
            next(rollouts)
        updates = learner.clock.updates - updates
        acts = 5 * 8 * (1 if name == "pong-ga3c" else 2)  # slots, groups
        if name == "snake-gpu":  # its actions stay there; what simulators answered comes here once a rollout, to be counted
            acts = 5
        # A shared store waits for each gradient, and may keep its locks no longer than it needs, also when it is read.
        theirs = updates + (updates + 5) * 3 if shared else 0
        assert updates >= 5 and gpu.waits - before == acts + theirs
    finally:
        learner.close()


@GPU
def test_a_gradient_is_there_before_a_lock_is_asked_for(monkeypatch):
    """Others would have to wait for it, too."""
    blocks = [SharedBlock(), SharedBlock()]
    learner = make_learner(small("pong-appo"), Custom(), meeting=Meeting(tuple(block.fd for block in blocks)))
    store = learner.store
    store.load(store.initial_state())
    hold, step, asked, stepping = store.locks.hold, store.step, [], []

    def look(number):
        if stepping and number == 0:
            asked.append(store._computed.query())
        return hold(number)

    def slowly(info):
        torch.cuda._sleep(3_000_000)  # the gradient is late
        stepping.append(0)
        receipt = step(info)
        stepping.clear()
        return receipt

    monkeypatch.setattr(store.locks, "hold", look)
    monkeypatch.setattr(store, "step", slowly)
    try:
        for _ in learner.run():
            if learner.clock.updates >= 6:
                break
    finally:
        learner.close()
    assert len(asked) >= 6 and all(asked)


@GPU
def test_a_stop_in_a_hurry_waits_for_nobody():
    """An update that was begun is given up in the middle of a rollout: to finish it may take others, who have stopped already."""
    learner = make_learner(small("overlapped"), Custom())
    try:
        next(item for item in learner.run() if item is None and learner._begun is not None)
        updates = learner.clock.updates
        learner.state(mid_rollout=True)
        assert learner._begun is None and learner.clock.updates == updates
    finally:
        learner.close()


@GPU
def test_who_acts_behind_has_the_parameters_of_the_rollout_before_also_after_a_resume():
    model = flatten(torch.nn.Linear(3, 2).cuda())
    actor = Actor(None, model, copy=True, aside=True, behind=True)
    resumed = Actor(None, model, copy=True, aside=True, behind=True)
    for i in range(4):
        model.parameters.fill_(i)
        actor.refresh(10 * i)
        torch.cuda.synchronize()
        assert (actor._model.parameters == max(i - 1, 0)).all() and actor.version == 10 * max(i - 1, 0)
        if i == 2:
            resumed.load(actor.state())
            assert resumed.state()["version"] == 10 and (resumed.state()["parameters"] == 1).all()
            resumed.refresh(20)  # as a run does when it begins
            torch.cuda.synchronize()
            assert (resumed._model.parameters == 1).all() and resumed.version == 10
    resumed.refresh(30)
    torch.cuda.synchronize()
    assert (resumed._model.parameters == 2).all() and resumed.version == 20


@GPU
def test_a_slow_learner_does_not_delay_whoever_acts_aside():
    """While the learner's stream is busy for a second the acting stream answers, on parameters from before."""
    model = flatten(torch.nn.Linear(3, 2).cuda())
    actor = Actor(None, model, copy=True, aside=True, behind=True)
    actor.refresh(0)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    actor.refresh(1)
    actor.stream.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()


@GPU
def test_whoever_acts_aside_explores_as_much_as_it_was_told(monkeypatch):
    """Also where the learner's stream is busy."""
    learner = make_learner(small("pong-dqn-512", graphs=False, exploration={"over": 150}), Custom())
    actor, explore, told, used = learner.actor, learner._explore, [], []
    act = actor.act

    def tell(clock):
        told.append(float(explore(clock)[0]))
        torch.cuda._sleep(3_000_000)
        return explore(clock)

    def look(obs, epsilon, noise):
        used.append((len(told) - 1, epsilon[0].clone()))
        return act(obs, epsilon, noise)

    monkeypatch.setattr(learner, "_explore", tell)
    monkeypatch.setattr(actor, "act", look)
    try:
        for _ in learner.run():
            if learner.clock.steps > 200:
                break
    finally:
        learner.close()
    assert len(set(told)) >= 4
    for rollout, epsilon in used:
        assert float(epsilon) == pytest.approx(told[rollout])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=AUTOCAST)])
@pytest.mark.parametrize("graphs", [True, False])
def test_bfloat16_is_nearly_the_same(device, graphs):
    """What the network says and what three updates do to it."""
    moved = {}
    for bf16 in (True, False):
        changes = {"device": device, "sampler": {"num_envs": 4, "horizon": 8, "decorrelate_steps": 0}, "graphs": graphs}
        learner = make_learner(load_recipe("pong-ppo", {**changes, "bf16": bf16, "memory": {"minibatches": 2}}), Custom())
        try:
            frames = torch.arange(4 * 4 * 84 * 84, device=device).remainder(251).to(torch.uint8).view(4, 4, 84, 84)
            with torch.no_grad():  # a graph of autograd's, kept alive, would end the capture
                logits, value = learner.model.net(frames)
            first = learner.model.parameters.cpu().clone()
            for _ in learner.run():
                if learner.clock.updates >= 3:
                    break
            moved[bf16] = (logits.float().cpu(), value.cpu(), learner.model.parameters.cpu() - first)
        finally:
            learner.close()
    for low, high in zip(moved[True][:2], moved[False][:2], strict=True):
        assert low.dtype == torch.float32 and not torch.equal(low, high)
        torch.testing.assert_close(low, high, rtol=0.05, atol=0.02)
    (_, _, low), (_, _, high) = moved[True], moved[False]
    assert low.isfinite().all() and torch.cosine_similarity(low, high, dim=0) > 0.5
