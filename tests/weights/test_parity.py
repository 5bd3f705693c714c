"""The parity check: pure comparison, tolerances, and the error."""

from __future__ import annotations

import asyncio
import math

import pytest

from async_rl.weights.parity import WeightParityError, check_parity, compare_logprobs, mean_tolerance


class Scores:
    """An engine that gives every token the same log-probability."""

    name = "scores"

    def __init__(self, value: float) -> None:
        self.value = value

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return [self.value] * (len(token_ids) - 1)


def test_mean_and_max_over_all_tokens():
    report = compare_logprobs([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    assert (report.mean_abs, report.max_abs, report.tokens) == (pytest.approx(0.5), 1.0, 3)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_infinitely_far(bad):
    assert compare_logprobs([[-1.0, bad]], [[-1.0, -1.0]]).mean_abs == math.inf
    assert compare_logprobs([[-1.0, -1.0]], [[-1.0, bad]]).mean_abs == math.inf


def test_lengths_must_agree_and_something_must_be_compared():
    with pytest.raises(ValueError, match="zip"):
        compare_logprobs([[-1.0]], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match="at least one token"):
        compare_logprobs([[]], [[]])


def check(engine_value: float, trainer_value: float, tolerance: float):
    reference = lambda ids: [trainer_value] * (len(ids) - 1)  # noqa: E731
    sequences = [[1, 2, 3], [4, 5]]
    return asyncio.run(check_parity(Scores(engine_value), reference, sequences, tolerance=tolerance, version=7))


def test_within_tolerance_reports_and_above_raises_with_engine_and_version():
    assert check(-1.0, -1.1, 0.2).mean_abs == pytest.approx(0.1)
    with pytest.raises(WeightParityError, match=r"scores.*version 7.*mean.*0\.3"):
        check(-1.0, -1.3, 0.2)


def test_nan_raises():
    with pytest.raises(WeightParityError):
        check(math.nan, -1.0, 0.15)


def test_the_coarser_dtype_sets_the_tolerance():
    assert mean_tolerance("float32") < mean_tolerance("bfloat16") == mean_tolerance("float32", "bfloat16")
    assert mean_tolerance("float32") < 0.25
    assert mean_tolerance("bfloat16") < 0.25
    with pytest.raises(ValueError, match="int8"):
        mean_tolerance("int8")
