"""Mathematics a model wrote as a sympy expression, without sympy's own parser, which evaluates its input as Python."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy

from async_rl.environments.expression import ExpressionError, ExpressionParser

_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "Abs"),
)
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E}


def parse_symbolic(text: str, local_dict: Mapping[str, Any] | None = None, **ignored: Any) -> Any:
    """A stand-in for ``sympy.parse_expr``: arithmetic, single-letter symbols and the usual functions.

    Args:
        text: The expression.
        local_dict: What names stand for; other letters are symbols.
        **ignored: Sympy's further options.

    Returns:
        The sympy expression.

    Raises:
        ExpressionError: anything else.
    """
    known = local_dict or {}

    def name(word: str) -> Any:
        if word in known:
            return known[word]
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if len(word) > 1:
            raise ExpressionError(f"the name {word!r} is not known")
        return sympy.Symbol(word)

    def call(function: str, argument: Any) -> Any:
        if function not in _FUNCTIONS:
            raise ExpressionError(f"the function {function!r} is not known")
        return getattr(sympy, function)(argument)

    return ExpressionParser(_number, _OPERATIONS, name, call, max_characters=4000).parse(text)


def _number(digits: str) -> Any:
    return sympy.Float(digits) if "." in digits else sympy.Integer(digits)


_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
