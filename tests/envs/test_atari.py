"""The Atari group against ale-py's own pieces: raw rewards, life loss, resets, screens."""

import gymnasium
import numpy as np
import pytest

from manyhands.envs.atari import AtariEnv, AtariGroup, game_of
from manyhands.types import UsageError


def play(group, seeds, actions):
    steps = [group.reset(seeds)]
    for a in actions:
        group.send(a)
        steps.append(group.recv())
    return steps


def test_equals_gymnasium_preprocessing():
    """Pixels, rewards and ends equal Gymnasium's AtariPreprocessing, in a game without FIRE and with no no-ops."""
    group = AtariGroup(AtariEnv(id="ALE/MsPacman-v5", noop_max=0).resolved(), 1)
    env = gymnasium.make("ALE/MsPacman-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=0, frame_skip=4)
    obs, _ = env.reset(seed=5)
    actions = np.random.default_rng(0).integers(0, 9, 400)
    steps = play(group, [5], actions[:, None])
    assert np.array_equal(steps[0].obs[0, 0], obs)
    rewards = 0.0
    for step, action in zip(steps[1:], actions, strict=True):
        obs, reward, terminated, _, _ = env.step(action)
        assert step.reward[0] == reward and step.terminated[0] == terminated
        assert np.array_equal(step.obs[0, 0], obs)
        rewards += reward
    assert rewards > 100  # raw, not clipped
    group.close()


def test_life_loss_is_signalled_and_the_game_goes_on():
    group = AtariGroup(AtariEnv(id="ALE/Breakout-v5").resolved(), 2)
    lost = ended = resets = 0
    rng = np.random.default_rng(0)
    for step in play(group, [1, 2], rng.integers(0, 4, (400, 2)))[1:]:
        lost += step.life_lost.sum()
        resets += step.first.sum()
        assert not (step.life_lost & step.first).any()
        assert step.reward[step.first].sum() == 0
        ended += step.terminated.sum()
    group.close()
    assert ended >= 1 and resets in (ended, ended - 1)
    assert lost >= 5 * ended  # five lives: the last one is lost with the game


def test_a_simulator_depends_only_on_its_own_seed():
    actions = np.random.default_rng(1).integers(0, 6, (50, 3))
    config = AtariEnv(id="ALE/Pong-v5").resolved()
    three, one = AtariGroup(config, 3), AtariGroup(config, 1)
    together, alone = play(three, [7, 8, 9], actions), play(one, [8], actions[:, 1:2])
    for a, b in zip(together, alone, strict=True):
        assert np.array_equal(a.obs[1], b.obs[0]) and a.reward[1] == b.reward[0]
    three.close(), one.close()


def test_restart_touches_only_the_marked():
    group = AtariGroup(AtariEnv(id="ALE/Pong-v5").resolved(), 2)
    before = play(group, [1, 2], np.zeros((60, 2), np.int64))[-1].obs.copy()
    step = group.restart(np.array([True, False]))
    assert step.first.tolist() == [True, False]
    assert np.array_equal(step.obs[1], before[1]) and not np.array_equal(step.obs[0], before[0])
    group.close()


def test_tall_images_crop_two_rows_and_halve():
    tall = AtariGroup(AtariEnv(id="ALE/Pong-v5", size="104x80").resolved(), 1, with_screen=True)
    step = play(tall, [3], np.zeros((40, 1), np.int64))[-1]
    assert tall.spec.frame == (1, 104, 80) and step.obs.shape == (1, 1, 104, 80)
    # The colour twin without two-frame maximum is not the same picture, but bright objects are at the same places.
    gray = tall.screen(0).mean(-1)[1:-1:2, ::2]
    assert np.corrcoef(gray.flatten(), step.obs[0, 0].flatten())[0, 1] > 0.9
    tall.close()


def test_screen_stays_in_lock_step():
    """The 84×84 input, enlarged, lies on the colour screen after many steps and a few lost lives."""
    group = AtariGroup(AtariEnv(id="ALE/Breakout-v5").resolved(), 1, with_screen=True)
    step = play(group, [4], np.random.default_rng(3).integers(0, 4, (150, 1)))[-1]
    assert group.screen(0).shape == (210, 160, 3)
    luminance = group.screen(0) @ np.array([0.299, 0.587, 0.114])
    rows, columns = (np.arange(84) * 2.5).astype(int), (np.arange(84) * 160 / 84).astype(int)
    assert np.corrcoef(luminance[rows][:, columns].flatten(), step.obs[0, 0].flatten())[0, 1] > 0.85
    group.close()


def test_a_wrong_action_is_refused_before_it_hangs_the_emulator():
    group = AtariGroup(AtariEnv(id="ALE/Pong-v5").resolved(), 1)
    group.reset([0])
    with pytest.raises(ValueError, match=r"outside 0\.\.5"):
        group.send(np.array([6]))
    group.close()


def test_reset_with_a_send_pending_is_safe():
    group = AtariGroup(AtariEnv(id="ALE/Pong-v5").resolved(), 2)
    group.reset([0, 1])
    group.send(np.array([0, 1]))
    assert group.reset([0, 1]).first.all()
    group.close()


def test_presets_and_names():
    assert AtariEnv(preset="sticky").resolved().sticky_actions == 0.25
    assert AtariEnv(preset="paper").resolved().noop_max == 30
    assert AtariEnv(preset="sticky", noop_max=5).resolved().noop_max == 5
    assert game_of("ALE/MsPacman-v5") == "ms_pacman"
    with pytest.raises(UsageError, match="did you mean 'ALE/Pong-v5'"):
        AtariEnv(id="ALE/Pnog-v5").check()
    assert AtariEnv(preset="sticky", life_loss=True).resolved().life_loss is False


def test_emulators_in_processes_are_the_same():
    import torch

    from manyhands.build import make_group

    env = AtariEnv(id="ALE/Breakout-v5", max_frames=60, life_loss=True)
    actions = np.random.default_rng(0).integers(0, 4, (40, 5))
    groups = [make_group(env.__class__(**{**vars(env), "workers": n}).resolved(), 5, torch.device("cpu")) for n in (0, 2)]
    try:
        steps = [group.reset(range(5)) for group in groups]
        for action in actions:
            for name in vars(steps[0]):
                assert np.array_equal(*(getattr(step, name) for step in steps)), name
            for group in groups:
                group.send(action)
            steps = [group.recv() for group in groups]
    finally:
        for group in groups:
            group.close()


def test_greedy_play_that_has_stalled_presses_fire():
    import torch

    from manyhands.evaluate import Player
    from manyhands.nets.flat import Model

    class Waits:
        def greedy(self, net, obs):
            return torch.zeros(len(obs), dtype=torch.int64)

    env = AtariEnv(id="ALE/Breakout-v5", noop_max=0)
    assert env.fire() == 1 and AtariEnv(id="ALE/MsPacman-v5").fire() is None
    nothing = Model(torch.nn.Identity(), torch.zeros(1), torch.zeros(1))
    for fire, ends in ((None, False), (1, True)):
        group = env.make(2)
        player = Player(Waits(), nothing, group, "greedy", 0.0, 0, fire)
        ended = [bool(player.play()[1].any()) for _ in range(500)]
        group.close()
        # The ball is served only with FIRE; each of five balls is lost by waiting.
        assert any(ended) == ends and bool(player.fired >= 5) == ends
