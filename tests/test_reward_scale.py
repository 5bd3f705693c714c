"""Rewards are shown in per cent only where they are shares."""

import math

import pytest

from async_rl.reward_scale import RewardScale, shown_evaluation


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ([0.0, 1.0], "46.9%"),
        ([], "46.9%"),
        ([0.1 + 0.2 + 0.7 + 1e-12], "46.9%"),
        ([0.0, 2.0], "0.469"),
        ([-0.5, 1.0], "0.469"),
    ],
)
def test_per_cent_while_all_rewards_seen_lie_between_0_and_1(rewards, shown):
    scale = RewardScale()
    scale.see(rewards)
    scale.see([0.5])
    assert scale.show(0.469) == shown


def test_a_mean_of_nothing_is_not_a_number_of_per_cent():
    assert RewardScale().show(math.nan) == "nothing measured"
    figures = {"eval_start": None, "eval_end": 3.25, "reward_min": 0.0, "reward_max": 9.0}
    assert [shown_evaluation(figures, name) for name in ("eval_start", "eval_end")] == ["nothing measured", "3.250"]
