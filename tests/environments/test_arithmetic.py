"""Arithmetic: which sums, and what is right."""

from __future__ import annotations

import pytest

from async_rl.environments import Arithmetic


def test_one_digit_is_all_81_ordered_pairs_in_both_splits() -> None:
    env = Arithmetic()
    train, evaluation = env.prompts("train"), env.prompts("eval")
    assert len(train) == len(evaluation) == 81
    assert {(r["a"], r["b"]) for r in train} == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert env.messages({"a": 3, "b": 4}) == [
        {"role": "user", "content": "What is 3 + 4? Answer with the number only."}
    ]


@pytest.mark.parametrize("digits", [2, 3, 9])
def test_more_digits_are_a_repeatable_sample_with_disjoint_splits(digits: int) -> None:
    env, again, other = (Arithmetic(digits=digits, train_size=300, eval_size=50, seed=s) for s in (0, 0, 1))
    train, evaluation = env.prompts("train"), env.prompts("eval")
    assert (len(train), len(evaluation)) == (300, 50)
    assert train == again.prompts("train")
    assert train != other.prompts("train")
    pairs = [(r["a"], r["b"]) for r in [*train, *evaluation]]
    assert len(set(pairs)) == 350
    assert all(10 ** (digits - 1) <= n < 10**digits for pair in pairs for n in pair)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7", 1.0),
        ("3 + 4 = 7.", 1.0),
        ("7.0", 1.0),
        ("7 or 8", 0.0),
        ("-7", 0.0),
        ("seven", 0.0),
        ("", 0.0),
        ("77", 0.0),
    ],
)
def test_the_last_number_must_be_the_sum(completion: str, reward: float) -> None:
    assert Arithmetic().reward({"a": 3, "b": 4}, completion) == reward


@pytest.mark.parametrize(
    "kwargs",
    [
        {"digits": 0},
        {"digits": 10},
        {"digits": 2, "train_size": 0},
        {"digits": 2, "train_size": 8000, "eval_size": 101},
    ],
)
def test_impossible_values_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"environment\."):
        Arithmetic(**kwargs)
