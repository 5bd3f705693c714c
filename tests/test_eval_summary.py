"""What the samples of an evaluation come to."""

import itertools
import logging
import math

import pytest

from async_rl.eval_failures import EvaluationError, report_failures
from async_rl.eval_summary import pass_at_k, which_k
from async_rl.types import EvalBatch, EvalResult, Prompt, Trajectory


def result(*rewards, environment="add", failures=()):
    trajectories = tuple(Trajectory(i, 0, [1, 2], [0, 1], [0.0, 0.0], (), 1, r) for i, r in enumerate(rewards))
    return EvalResult(Prompt(f"eval/{environment}/0", environment, {}), trajectories, tuple(failures))


def summary(*results, **kwargs):
    return EvalBatch(version=3, results=results, seconds=1.0, **kwargs).summary()


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass(n):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_is_exact():
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-12)
    assert pass_at_k(10_000, 9_000, 5_000) == 1.0


def test_k_goes_up_in_powers_of_two_to_the_number_of_samples():
    assert [which_k(n) for n in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


def test_mean_and_pass_at_k():
    told = summary(result(1.0, 0.0, 0.0, 0.0), result(0.0, 0.0, 0.0, 0.5), result(1.0, 1.0, 1.0, 0.0))
    assert told["reward"] == told["reward_lower_bound"] == pytest.approx(4.5 / 12)
    assert told["pass@1"] == pytest.approx((1 / 4 + 0 + 3 / 4) / 3)
    assert told["pass@2"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert told["pass@4"] == told["pass_at_k"] == pytest.approx(2 / 3)
    assert (told["version"], told["samples"], told["prompts"], told["failures"]) == (3, 12, 3, 0)


def test_what_passes_can_be_set_and_rounding_does_not_fail_a_sample():
    assert summary(result(0.7 + 0.2 + 0.1))["pass@1"] == 1.0
    assert summary(result(0.4, 0.6), pass_threshold=0.5)["pass@1"] == 0.5
    assert summary(result(0.4, 0.6))["pass@1"] == 0.0


def test_failures_are_told_and_bound_the_mean_from_below():
    told = summary(result(1.0, failures=["timeout: late"]), result(1.0, 0.5))
    assert (told["failures"], told["samples"]) == (1, 3)
    assert told["reward"] == pytest.approx(2.5 / 3)
    assert told["reward_lower_bound"] == pytest.approx(2.5 / 4)
    assert (told["pass@1"], told["pass@2"]) == (0.5, 1.0)  # a failed sample does not pass, and is drawn like any other
    assert summary(result(-1.0, 1.0, failures=["timeout: late"]))["reward_lower_bound"] == pytest.approx(-1 / 3)


def test_nothing_finished_is_no_zero():
    told = summary(result(failures=["a: x", "a: x"]), result(failures=["a: x", "b: y"]))
    assert math.isnan(told["reward"])
    assert (told["samples"], told["failures"], told["reward_lower_bound"], told["pass@2"]) == (0, 4, 0.0, 0.0)
    assert math.isnan(summary()["reward"])


def test_each_environment_has_its_own_numbers():
    told = summary(
        result(1.0, 1.0),
        result(0.0, failures=["timeout: late"], environment="tools"),
        result(1.0, 0.0),
        pass_threshold=1,
    )
    assert (told["reward/add"], told["pass@1/add"], told["failures/add"]) == (0.75, 0.75, 0)
    assert (told["reward/tools"], told["pass@2/tools"], told["failures/tools"]) == (0.0, 0.0, 1)
    assert told["reward_lower_bound/tools"] == 0.0
    alone = summary(result(1.0, 1.0))
    assert {name for name in alone if "/" in name} == {"reward/add"}


def test_failures_are_said_aloud(caplog):
    some = EvalBatch(4, (result(1.0, failures=["timeout: late", "timeout: later"]),), 1.0)
    with caplog.at_level(logging.WARNING):
        report_failures(some, may_raise=True)
    assert "version 4: 2 of 3 samples failed (timeout 2x)" in caplog.text
    assert "timeout: late" in caplog.text


def test_an_evaluation_that_measured_nothing_ends_a_run_that_has_trained_nothing_and_no_other(caplog):
    nothing = EvalBatch(0, (result(failures=["RewardError: broken"]),), 1.0)
    with pytest.raises(EvaluationError, match=r"1 of 1 samples failed.*RewardError: broken"):
        report_failures(nothing, may_raise=True)
    report_failures(nothing, may_raise=False)
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_an_evaluation_without_prompts_is_said_aloud(caplog):
    report_failures(EvalBatch(0, (), 0.0), may_raise=True)
    assert "no prompts" in caplog.text


def test_an_evaluation_without_failures_says_nothing(caplog):
    report_failures(EvalBatch(0, (result(0.0),), 0.0), may_raise=True)
    assert not caplog.records
