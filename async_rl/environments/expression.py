"""Arithmetic a model wrote, parsed by hand: nothing is evaluated as Python, and no input can take long."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Generic, TypeVar

from async_rl.environments.base import ToolError

T = TypeVar("T")

_MAX_DEPTH = 32  # of parentheses, signs and powers; each costs a few frames of the parser
_MAX_BITS = 256  # of a numerator or denominator: about 77 digits
_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)|(?P<name>[A-Za-z]+)|(?P<sign>\*\*|//|\S))")
_SAME = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"}


class ExpressionError(ToolError, ValueError):
    """Text that is no arithmetic, or arithmetic beyond the bounds; the message can be shown to the model."""


class ExpressionParser(Generic[T]):
    """Recursive descent over ``+ - * / // % **``, signs, parentheses, numbers, and names where they are known.

    Args:
        number: Makes a value of the digits of a number.
        operations: What each of ``+ - * / // % **`` does.
        name: Makes a value of a name; ``None``: names are refused.
        call: Makes a value of a function's name and its argument; ``None``: calls are refused.
        max_characters: Longer expressions are refused.
    """

    def __init__(
        self,
        number: Callable[[str], T],
        operations: Mapping[str, Callable[[T, T], T]],
        name: Callable[[str], T] | None = None,
        call: Callable[[str, T], T] | None = None,
        max_characters: int = 200,
    ) -> None:
        self._number = number
        self._operations = operations
        self._name = name
        self._call = call
        self._max_characters = max_characters
        self._text = ""
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._depth = 0

    def parse(self, text: str) -> T:
        """The value of ``text``.

        Raises:
            ExpressionError: it is too long, or no expression; says where it stops being one.
        """
        if len(text) > self._max_characters:
            raise ExpressionError(f"the expression has {len(text)} characters, at most {self._max_characters} fit")
        self._text = text
        self._tokens = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text.rstrip())]
        self._tokens = [(kind, _SAME.get(token, token)) for kind, token in self._tokens]
        self._at = self._depth = 0
        value = self._sum()
        if self._peek():
            raise self._unexpected()
        return value

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if token not in wanted or not token:
            return ""
        self._at += 1
        return token

    def _sum(self) -> T:
        value = self._product()
        while sign := self._take("+", "-"):
            value = self._operations[sign](value, self._product())
        return value

    def _product(self) -> T:
        value = self._signed()
        while sign := self._take("*", "/", "//", "%"):
            value = self._operations[sign](value, self._signed())
        return value

    def _signed(self) -> T:
        if sign := self._take("+", "-"):
            return self._operations[sign](self._number("0"), self._inside(self._signed))
        return self._power()

    def _power(self) -> T:
        base = self._atom()
        return self._operations["**"](base, self._inside(self._signed)) if self._take("**") else base

    def _atom(self) -> T:
        if self._take("("):
            return self._closed()
        if self._at == len(self._tokens):
            raise self._unexpected()
        kind, token = self._tokens[self._at]
        if kind == "number":
            self._at += 1
            return self._number(token.replace(",", ""))
        if kind != "name" or self._name is None:
            raise self._unexpected()
        self._at += 1
        if self._call is not None and self._take("("):
            return self._call(token, self._closed())
        return self._name(token)

    def _closed(self) -> T:
        value = self._inside(self._sum)
        if not self._take(")"):
            raise self._unexpected()
        return value

    def _inside(self, part: Callable[[], T]) -> T:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ExpressionError(f"more than {_MAX_DEPTH} parentheses or signs inside each other")
        value = part()
        self._depth -= 1
        return value

    def _unexpected(self) -> ExpressionError:
        found = repr(self._peek()) if self._peek() else "the end"
        return ExpressionError(f"cannot read {self._text!r}: unexpected {found}; use numbers, + - * / ( )")


def evaluate(text: str) -> Fraction:
    """The exact value of arithmetic with numbers.

    Raises:
        ExpressionError: no arithmetic, a division by zero, or a number beyond about 77 digits.
    """
    operations = {sign: _bounded(function) for sign, function in _OPERATIONS.items()}
    try:
        return ExpressionParser(_fraction, operations).parse(text)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None


def show(value: Fraction) -> str:
    """A value as people write it: ``"12"``, ``"-0.25"``; at most six decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _fraction(digits: str) -> Fraction:
    return _check(Fraction(digits.rstrip(".") or "0"))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # The size of the result is known before it is computed, so 9**9**9 costs nothing.
    if exponent.denominator != 1 or abs(exponent) * max(_bits(base) - 1, 1) > _MAX_BITS:
        raise ExpressionError("the exponent must be a whole number and the result have at most 77 digits")
    return base ** int(exponent)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": _power,
}


def _bounded(function: Callable[[Any, Any], Any]) -> Callable[[Fraction, Fraction], Fraction]:
    return lambda a, b: _check(Fraction(function(a, b)))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check(value: Fraction) -> Fraction:
    if _bits(value) > _MAX_BITS:
        raise ExpressionError("the numbers get too large: at most 77 digits are allowed")
    return value
