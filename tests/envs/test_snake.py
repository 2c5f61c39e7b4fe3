"""Snake against a plain Python game that knows nothing of tensors, and its scripted rules."""

import gymnasium
import numpy as np
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands.envs.snake as snake
from manyhands.envs.snake import APPLE, BODY, DOWN, HEAD, LEFT, RIGHT, UP, SnakeEnv, SnakeGroup
from tests.gpu import GPU


class PlainSnake:
    """One board as a list of cells. Apples are copied from the board under test: only their place is random."""

    def __init__(self, n: int, apple: int) -> None:
        self.n, self.apple, self.heading, self.hungry = n, apple, RIGHT, 0
        middle = (n // 2) * n + n // 2
        self.body = [middle - 1, middle]  # tail first

    def step(self, action: int, patience: int) -> tuple[float, bool, bool]:
        if abs(action - self.heading) != 2:
            self.heading = action
        row, column = divmod(self.body[-1], self.n)
        row += {UP: -1, DOWN: 1}.get(self.heading, 0)
        column += {LEFT: -1, RIGHT: 1}.get(self.heading, 0)
        inside = 0 <= row < self.n and 0 <= column < self.n
        cell = row * self.n + column
        eats = inside and cell == self.apple
        remaining = self.body if eats else self.body[1:]
        if not inside or cell in remaining:
            return -1.0, True, False
        self.body = [*remaining, cell]
        self.hungry = 0 if eats else self.hungry + 1
        full = len(self.body) == self.n**2
        return float(eats), full, not full and self.hungry >= patience


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 2), board=st.integers(4, 7), greedy=st.booleans())
def test_boards_equal_a_plain_game(seed, board, greedy):
    B, patience = 5, 30
    group = SnakeGroup(SnakeEnv(board=board, patience=patience, cell_pixels=1), B)
    group.reset([seed + i for i in range(B)])
    games = [PlainSnake(board, int(group._apple[i])) for i in range(B)]
    ended = [False] * B
    rng = np.random.default_rng(seed)
    for _ in range(120):
        actions = rng.integers(0, 4, B)
        if greedy:  # walk towards the apple, so that snakes grow
            for i, game in enumerate(games):
                (r, c), (ar, ac) = divmod(game.body[-1], board), divmod(game.apple, board)
                actions[i] = (DOWN if ar > r else UP) if ar != r else (RIGHT if ac > c else LEFT)
        group.send(actions)
        step = group.recv()
        for i, game in enumerate(games):
            if ended[i]:
                assert step.first[i] and step.reward[i] == 0
                games[i] = PlainSnake(board, int(group._apple[i]))
                ended[i] = False
            else:
                reward, terminated, truncated = game.step(int(actions[i]), patience)
                assert (float(step.reward[i]), bool(step.terminated[i]), bool(step.truncated[i])) == (
                    reward,
                    terminated,
                    truncated,
                )
                ended[i] = terminated or truncated
            game = games[i]
            if float(step.reward[i]) == 1.0:
                assert ended[i] or int(group._apple[i]) not in game.body
                game.apple = int(group._apple[i])
            picture = np.zeros(board**2, int)
            picture[game.body] = BODY
            picture[game.apple] = APPLE
            picture[game.body[-1]] = HEAD
            assert step.obs[i].flatten().tolist() == picture.tolist()


def test_starts_in_the_middle_with_length_two():
    step = SnakeGroup(SnakeEnv(board=10), 1).reset([3])
    image = np.asarray(step.obs[0, 0])[::2, ::2]
    assert image.shape == (10, 10)
    assert image[5, 5] == HEAD and image[5, 4] == BODY and (image == APPLE).sum() == 1


def test_a_board_depends_only_on_its_own_seed_and_actions():
    def play(seeds, actions):
        group = SnakeGroup(SnakeEnv(board=6), len(seeds))
        frames = [group.reset(seeds).obs]
        for a in actions:
            group.send(a)
            frames.append(group.recv().obs)
        return torch.stack(frames)

    actions = torch.randint(0, 4, (60, 3), generator=torch.Generator().manual_seed(0))
    together = play([5, 6, 7], actions)
    assert torch.equal(together[:, 1:2], play([6], actions[:, 1:2]))


def test_apples_are_uniform_over_free_cells():
    group = SnakeGroup(SnakeEnv(board=4), 14_000)
    group.reset(list(range(14_000)))
    counts = torch.bincount(group._apple, minlength=16).float()
    free = group._fresh == 0
    assert counts[~free].sum() == 0
    assert (((counts[free] - 1000) ** 2) / 1000).sum() < 40  # 13 degrees of freedom: p < 2e-4


def test_continues_from_a_saved_state():
    group = SnakeGroup(SnakeEnv(board=5), 4)
    group.reset([1, 2, 3, 4])
    actions = torch.randint(0, 4, (40, 4), generator=torch.Generator().manual_seed(1))
    for a in actions[:20]:
        group.send(a)
        group.recv()
    saved = {k: v.clone() for k, v in group.state().items()}
    other = SnakeGroup(SnakeEnv(board=5), 4)
    other.load(saved)
    for a in actions[20:]:
        group.send(a), other.send(a)
        one, two = group.recv(), other.recv()
        assert torch.equal(one.obs, two.obs) and torch.equal(one.reward, two.reward) and torch.equal(one.first, two.first)


def test_registered_with_gymnasium_and_passes_its_checker():
    env = gymnasium.make("manyhands/Snake-v0", render_mode="rgb_array")
    check_env(env.unwrapped)
    env.reset(seed=0)
    assert env.render().shape == (240, 240, 3)


@GPU
def test_gpu_boards_equal_cpu_boards():
    config = snake.SnakeEnv(board=6, on_device=True)
    groups = [SnakeGroup(config, 64, device) for device in ("cpu", "cuda")]
    for group in groups:
        group.reset(list(range(64)))
    for a in torch.randint(0, 4, (100, 64)):
        for group in groups:
            group.send(a)
        one, two = (group.recv() for group in groups)
        assert torch.equal(one.obs, two.obs.cpu()) and torch.equal(one.reward, two.reward.cpu())
