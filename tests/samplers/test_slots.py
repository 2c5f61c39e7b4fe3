"""Answers as words: what goes in comes out, and what is learned from them, by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.samplers.slots import ANSWER, NAMES, learnable, parts, write_down
from manyhands.types import Step
from tests.gpu import DEVICES

answer = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.floats(width=32, allow_nan=False))


def words_of(*rows):
    """[T, 1] of one simulator's answers, in the order of NAMES."""
    answers = np.zeros((len(rows), 1), ANSWER)
    for t, row in enumerate(rows):
        named = {name: np.array([value]) for name, value in zip(NAMES, row, strict=True)}
        write_down(Step(obs=np.zeros(1), **named), answers[t])
    return torch.from_numpy(answers.view(np.int64))


@given(st.lists(answer, min_size=1, max_size=5))
def test_parts_are_what_was_written_down(rows):
    found = parts(words_of(*rows))
    assert list(found) == list(NAMES)
    for i, name in enumerate(NAMES):
        assert found[name][:, 0].tolist() == [row[i] for row in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("life_loss", [False, True])
def test_what_is_learned_by_hand(device, life_loss):
    plain, lost, ended = (False,) * 4, (False, False, False, True), (False, True, False, False)
    reset, stopped = (True, False, False, False), (False, False, True, False)
    rows = [(*plain, 3.0), (*lost, -2.5), (*ended, 0.5), (*reset, 9.0), (*stopped, 0.0), (*reset, 0.0)]
    found = learnable(words_of(*rows).to(device), life_loss, 0.5, 1.0)
    assert found["reward"][:, 0].tolist() == [1.0, -1.0, 0.5, 1.0, 0.0, 0.0]  # that of a reset has no weight
    assert found["weight"][:, 0].tolist() == [1, 1, 1, 0, 1, 0]
    assert found["cut"][:, 0].tolist() == [False, life_loss, True, True, True, True]
    assert found["discount"][:, 0].tolist() == [0.5, 0.0 if life_loss else 0.5, 0.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("rewards", [[70.0], [70.0, -3.0]])
def test_rewards_that_are_not_clipped_stay_what_they_are(rewards):
    words = words_of(*((*(False,) * 4, reward) for reward in rewards))
    found = learnable(words, False, 0.9, 0.0)["reward"]
    words.zero_()  # the next rollout's answers
    assert found[:, 0].tolist() == rewards
