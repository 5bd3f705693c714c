"""Whether a value from a config or a call is what an annotation asks for, and what that is in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from typing import Any, Literal

from async_rl.config import Range

ANY_NUMBER = Range()
_LISTS = (list, tuple, Sequence, set, frozenset, AbstractSet)
"""All of these are written as lists in YAML."""
_SECTIONS = (dict, Mapping)
_WORDS: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a string", "strings"),
    types.NoneType: ("null", "null"),
}
"""One of a type, and several."""
_EXAMPLES: Mapping[Any, tuple[str, str]] = {
    int: ("1", "2"),
    float: ("0.5", "1"),
    bool: ("true", "false"),
    str: ("a", "b"),
}


def type_fault(value: Any, annotation: Any, allowed: Range = ANY_NUMBER) -> str:
    """What ``annotation`` and ``allowed`` ask for, if ``value`` is not that; empty if it is, or if it can't be told."""
    options = _options(annotation)
    if any(_matches(value, option) for option in options):
        return "" if not is_number(value) or value in allowed else f"a number {allowed}"
    wanted = " or ".join(_describe(option) for option in options)
    wanted = f"{wanted} {allowed}".rstrip() if int in options or float in options else wanted
    example = next(filter(None, (_example(option, value) for option in options)), "")
    return wanted + (f", e.g. {example}" if example else "")


def is_number(value: Any) -> typing.TypeGuard[float]:
    """Whether it is a number; true and false are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _matches(value: Any, annotation: Any) -> bool:
    """Whether it fits; what an annotation of another kind asks for is not known, so anything does."""
    if isinstance(value, Mapping) and "_target_" in value:  # what it makes is not known yet
        return True
    origin = typing.get_origin(annotation) or annotation
    if _is_union(annotation):
        return any(_matches(value, option) for option in _options(annotation))
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in typing.get_args(annotation))
    if annotation is float:
        return is_number(value)
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if annotation in (str, bool):
        return isinstance(value, annotation)
    if origin in _LISTS:
        return isinstance(value, list | tuple | AbstractSet) and _items_match(list(value), annotation)
    if origin in _SECTIONS:
        return isinstance(value, Mapping) and _pairs_match(value, annotation)
    return True


def _items_match(items: Sequence[Any], annotation: Any) -> bool:
    wanted = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and wanted[-1:] != (...,):
        return len(items) == len(wanted) and all(map(_matches, items, wanted))
    return not wanted or all(_matches(item, wanted[0]) for item in items)


def _pairs_match(pairs: Mapping[Any, Any], annotation: Any) -> bool:
    wanted = typing.get_args(annotation)
    if not wanted:
        return True
    key = Any if wanted[0] is str else wanted[0]  # YAML makes a number of a name of digits
    return all(_matches(k, key) and _matches(v, wanted[1]) for k, v in pairs.items())


def _describe(annotation: Any, several: bool = False) -> str:
    """What it asks for; empty for a type that nothing is known of."""
    origin, args = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if _is_union(annotation):
        options = [_describe(option, several) for option in args]
        return " or ".join(options) if all(options) else ""
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in _LISTS:
        words = "lists" if several else "a list"
        if origin is tuple and args and args[-1] is not ...:
            return f"{words} of {len(args)} values"
        inside = _describe(args[0], several=True) if args else ""
        return f"{words} of {inside}" if inside else words
    if origin in _SECTIONS:
        words = "sections" if several else "a section"
        inside = _describe(args[1], several=True) if args else ""
        names = _describe(args[0], several=True) if args and args[0] is not str else ""
        return (f"{words} of {inside}" if inside else f"{words} with keys of its own") + (f" by {names}" * bool(names))
    return _WORDS[annotation][several] if annotation in _WORDS else ""


def _example(annotation: Any, value: Any) -> str:
    """A list or a section as it is written, of the value given where that fits; empty where that is not simple."""
    origin, args = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is tuple and args and args[-1] is not ...:
        args = args if all(a in _EXAMPLES for a in args) else ()
        return f"[{', '.join(_EXAMPLES[a][0] for a in args)}]" if args else ""
    if origin in _LISTS and args:
        if isinstance(value, str | Real) and _describe(args[0]) and _matches(value, args[0]):
            return f"[{str(value).lower() if isinstance(value, bool) else value}]"
        return f"[{', '.join(_EXAMPLES[args[0]])}]" if args[0] in _EXAMPLES else ""
    if origin in _SECTIONS and args and args[0] is str and args[1] in _EXAMPLES:
        return f"{{a: {_EXAMPLES[args[1]][0]}}}"
    return ""


def _options(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
