"""A mean reward looks the same whatever the rewards of the run are so far."""

import math

import pytest

from async_rl.reward_text import mean_reward


@pytest.mark.parametrize(
    ("mean", "shown"),
    [
        (0.4688, "0.469"),
        (1.2, "1.200"),
        (-0.5, "-0.500"),
        (math.nan, "nothing measured"),
        (None, "nothing measured"),
    ],
)
def test_a_mean_reward_is_a_number(mean, shown):
    assert mean_reward(mean) == shown
