"""Arithmetic: sums of two numbers, the smallest task a small model can be seen to learn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import SingleTurn
from async_rl.environments.numbers import last_number


class Arithmetic(SingleTurn):
    """``What is a + b?`` for numbers of ``digits`` digits; 1 if the last number in the answer is the sum, else 0.

    No partial credit: with 0.2 for a right number anywhere, a 135M model settles on exactly 0.2.

    With one digit all 81 ordered pairs of 1..9 are both splits. With more, the splits are disjoint samples of the
    ordered pairs, the same ones for the same ``seed``.

    Args:
        digits: Digits of both numbers, in [1, 9].
        train_size: Training sums with two and more digits, >= 1.
        eval_size: Evaluation sums with two and more digits, >= 1.
        seed: Picks the sums with two and more digits.
        name: Name for metrics and the ledger.

    Raises:
        ValueError: a number out of range, or more sums than there are.
    """

    def __init__(
        self, digits: int = 1, train_size: int = 2000, eval_size: int = 200, seed: int = 0, name: str = "arithmetic"
    ) -> None:
        if not 1 <= digits <= 9:
            raise ValueError(f"environment.digits={digits}: must be in [1, 9]")
        if train_size < 1 or eval_size < 1:
            raise ValueError(f"environment.train_size={train_size}, eval_size={eval_size}: each must be >= 1")
        self.name = name
        low, high = 10 ** (digits - 1), 10**digits
        span = high - low
        if digits == 1:
            self._train = self._eval = [self._row(a, b) for a in range(low, high) for b in range(low, high)]
            return
        if train_size + eval_size > span * span:
            raise ValueError(
                f"environment.train_size + eval_size = {train_size + eval_size}: there are only {span * span} sums of "
                f"{digits} digits"
            )
        picked = random.Random(seed).sample(range(span * span), train_size + eval_size)
        rows = [self._row(low + i // span, low + i % span) for i in picked]
        self._train, self._eval = rows[:train_size], rows[train_size:]

    @staticmethod
    def _row(a: int, b: int) -> dict[str, int]:
        return {"a": a, "b": b}

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {prompt['a']} + {prompt['b']}? Answer with the number only."}]

    @override
    def reward(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(last_number(completion) == prompt["a"] + prompt["b"])
