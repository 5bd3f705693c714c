"""Finds the number a completion gives as its answer. Reads text only; nothing the model wrote is ever evaluated."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus counts as a sign only where nothing ends right before it: "= -7" is negative, "10-7" is not.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]%.])[-−])?"
    r"(?:[$€£]\s?(?P<inner>[-−])?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``: thousands separators, decimals, signs and currency understood, units ignored."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    return None if last is None else _value(last)


def final_number(text: str) -> Decimal | None:
    """The first number after the last ``####``, else the last number in ``text``, else ``None``."""
    before, marker, after = text.rpartition("####")
    if marker and (match := _NUMBER.search(after)):
        return _value(match)
    return last_number(before if marker else text)


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] or match["inner"] else value
