"""Which number a completion gives as its answer."""

from __future__ import annotations

from decimal import Decimal

import pytest

from async_rl.environments.numbers import final_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"), ("The answer is 72.", "72"), ("3 + 4 = 7", "7"), ("3+4=7", "7"), ("48/2=24", "24"),
        ("1,234", "1234"), ("$1,234,567.50 in all", "1234567.5"), ("1, 2, 3", "3"), ("1,2345", "2345"),
        ("-5", "-5"), ("x = -5", "-5"), ("−5", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("10-7", "7"), ("(2)-3", "3"),
        ("a 5 - 3", "3"), ("0.5", "0.5"), (".5", "0.5"), ("7.00", "7"), ("50%", "50"), ("18 apples", "18"),
        ("**12**", "12"), (r"\boxed{12}", "12"), ("£ 8", "8"), ("8 km/h", "8"), ("007", "7"),
    ],
)  # fmt: skip
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "...", "####", "-", "$", "٣"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None
    assert final_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3.\n#### 72", "72"), ("#### 72\nthat is 5 more", "72"), ("#### 1,000 dollars", "1000"),
        ("####-3", "-3"), ("#### $18.00", "18"), ("#### 5\n#### 6", "6"), ("it is 9", "9"), ("it is 9 ####", "9"),
        ("#### the answer is 4", "4"), ("#### 1 2 3", "1"),
    ],
)  # fmt: skip
def test_final_number(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


def test_long_texts_take_no_time() -> None:
    assert last_number("1," * 100_000 + "111," * 100_000 + "1") == 1
    assert last_number("9" * 200_000) == Decimal("9" * 200_000)
