"""Advantages against numbers worked out by hand, and the nesting every AdvantageFn keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algorithms.advantages import GRPO, RLOO, BatchNormalised, DrGRPO, batch_normalised, dr_grpo, grpo, rloo

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0], dtype=torch.float64)  # mean 1, sample variance (0+1+1+4)/3 = 2


def test_grpo_by_hand():
    expected = torch.tensor([0.0, -1.0, -1.0, 2.0], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(grpo(REWARDS, epsilon=1e-12), expected)


def test_grpo_epsilon_is_added_to_the_standard_deviation():
    pair = torch.tensor([0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(grpo(pair, epsilon=0.5)[1], torch.tensor(0.5 / (math.sqrt(0.5) + 0.5)).double())


def test_dr_grpo_by_hand():
    torch.testing.assert_close(dr_grpo(REWARDS), torch.tensor([0.0, -1.0, -1.0, 2.0], dtype=torch.float64))


def test_rloo_by_hand():
    # baselines: (0+0+3)/3 = 1, (1+0+3)/3 = 4/3, the same, (1+0+0)/3 = 1/3
    torch.testing.assert_close(rloo(REWARDS), torch.tensor([0.0, -4 / 3, -4 / 3, 8 / 3], dtype=torch.float64))


def test_batch_normalised_by_hand():
    groups = [torch.tensor([1.0, 0.0]).double(), torch.tensor([5.0, 5.0]).double(), torch.tensor([2.0, 0.0]).double()]
    # centred: 0.5 -0.5 | 0 0 | 1 -1; mean 0, sample variance (0.25*2 + 2)/5 = 0.5
    expected = [[0.5, -0.5], [0.0, 0.0], [1.0, -1.0]]
    for got, want in zip(batch_normalised(groups, 1e-12), expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want).double() / math.sqrt(0.5))


def test_batch_normalised_without_group_baseline_by_hand():
    groups = [torch.tensor([1.0]).double(), torch.tensor([3.0]).double()]  # mean 2, sample variance 2
    first, second = batch_normalised(groups, 1e-12, group_baseline=False)
    torch.testing.assert_close(torch.cat([first, second]), torch.tensor([-1.0, 1.0]).double() / math.sqrt(2))


@pytest.mark.parametrize("advantage", [GRPO(), DrGRPO(), RLOO(), BatchNormalised()])
def test_classes_keep_the_nesting_and_centre_every_group(advantage):
    rewards = [[1.0, 0.0, 0.5], [0.1] * 8, [2.0], [0.0, 1.0]]
    advantages = advantage(rewards)
    assert [len(group) for group in advantages] == [3, 8, 1, 2]
    assert advantages[0][0] > 0 > advantages[0][1]
    assert advantages[1] == (0.0,) * 8, "equal rewards carry no signal, not even a rounding error"
    assert advantages[2] == (0.0,)
    for group in advantages:
        assert sum(group) == pytest.approx(0.0, abs=1e-9)
        assert all(type(value) is float for value in group)


@pytest.mark.parametrize("advantage", [GRPO(), DrGRPO(), RLOO(), BatchNormalised()])
def test_an_empty_batch_has_no_advantages(advantage):
    assert advantage([]) == ()


def test_only_batch_normalised_needs_the_batch():
    assert [a.needs_batch for a in (GRPO(), DrGRPO(), RLOO(), BatchNormalised())] == [False, False, False, True]
    rewards = [[1.0, 0.0], [0.0, 0.0, 1.0]]
    for advantage in (GRPO(), DrGRPO(), RLOO()):
        assert advantage(rewards) == advantage(rewards[:1]) + advantage(rewards[1:])
    assert BatchNormalised()(rewards) != BatchNormalised()(rewards[:1]) + BatchNormalised()(rewards[1:])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        GRPO(epsilon=epsilon)
    with pytest.raises(ValueError, match="epsilon"):
        BatchNormalised(epsilon=epsilon)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(0.1, 10), st.floats(-10, 10))
def test_shift_and_scale(rewards, scale, shift):
    values = torch.tensor(rewards, dtype=torch.float64)
    if values.std() < 1e-3:
        return
    torch.testing.assert_close(rloo(values * scale + shift), rloo(values) * scale, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grpo(values * scale + shift, 1e-12), grpo(values, 1e-12), rtol=1e-6, atol=1e-6)
