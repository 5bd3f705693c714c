"""Learning rate schedules by hand, and stepped as an optimizer sees them."""

import math

import pytest
import torch

from async_rl.schedules import lr_factor, make_schedule


def factors(schedule, warmup, steps):
    return [lr_factor(v, schedule, warmup, steps) for v in range(steps)]


def test_by_hand():
    assert factors("constant", 0, 3) == [1.0, 1.0, 1.0]
    assert factors("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert factors("linear", 2, 6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors("cosine", 0, 2) == pytest.approx([1.0, 0.5])
    assert factors("cosine", 1, 4) == pytest.approx([1.0, 1.0, 0.5 + 0.5 * math.cos(math.pi / 3), 0.25])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 20])
def test_no_step_is_wasted_on_a_rate_of_zero(schedule, warmup):
    assert all(0 < f <= 1 for f in factors(schedule, warmup, 12))


def test_a_run_longer_than_planned_ends_at_zero_not_below():
    assert lr_factor(100, "linear", 2, 10) == 0.0
    assert lr_factor(100, "cosine", 2, 10) == pytest.approx(0.0)


def test_the_scheduler_gives_the_rate_of_each_version():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make_schedule(optimizer, "linear", 2, 4)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 2.0, 2.0, 1.0]
