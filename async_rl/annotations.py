"""The types that annotations in source code stand for, read without importing anything."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
_OF_ITEMS: Mapping[str, Any] = {
    **{"list": list, "List": list, "tuple": tuple, "Tuple": tuple, "Sequence": Sequence},
    **{"set": set, "Set": set, "AbstractSet": set, "frozenset": frozenset, "FrozenSet": frozenset},
    **{"dict": dict, "Dict": dict, "Mapping": Mapping},
}


def annotated_type(node: ast.expr | None, defined: Callable[[str], ast.expr | None]) -> Any:
    """The type an annotation stands for; ``None``: not known.

    Args:
        node: The annotation.
        defined: What its module defines a name as; ``None`` if it doesn't.
    """
    if isinstance(node, ast.Constant):
        return type(None) if node.value is None else _quoted(node.value, defined)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right], defined)
    if isinstance(node, ast.Subscript):
        return _subscribed(_last(node.value), node.slice, defined)
    if isinstance(node, ast.Name | ast.Attribute):
        name = _last(node)
        if isinstance(node, ast.Name) and name in _PLAIN:
            return _PLAIN[name]
        if isinstance(node, ast.Name) and (value := defined(name)) is not None:
            return annotated_type(value, lambda other: None if other == name else defined(other))  # may name itself
        return _OF_ITEMS.get(name)
    return None


def _quoted(text: object, defined: Callable[[str], ast.expr | None]) -> Any:
    try:
        return annotated_type(ast.parse(str(text), mode="eval").body, defined)
    except SyntaxError:
        return None


def _subscribed(name: str, content: ast.expr, defined: Callable[[str], ast.expr | None]) -> Any:
    parts = content.elts if isinstance(content, ast.Tuple) else [content]
    if name == "Literal":
        try:
            return Literal[ast.literal_eval(content)]
        except ValueError:  # a member of an enumeration
            return None
    if name == "Optional":
        return _union([content, ast.Constant(None)], defined)
    if name == "Union":
        return _union(parts, defined)
    if name not in _OF_ITEMS:
        return None
    kind = _OF_ITEMS[name]
    inside = [_inside(part, defined) for part in parts]
    return kind[tuple(inside)] if len(inside) == 2 or kind not in (dict, Mapping) else kind


def _inside(node: ast.expr, defined: Callable[[str], ast.expr | None]) -> Any:
    """The type of the items: of a list of anything it is still known that it is a list."""
    if isinstance(node, ast.Constant) and node.value is ...:
        return ...
    found = annotated_type(node, defined)
    return Any if found is None else found


def _union(nodes: Sequence[ast.expr], defined: Callable[[str], ast.expr | None]) -> Any:
    options = [annotated_type(node, defined) for node in nodes]
    return None if any(option is None for option in options) else typing.Union[tuple(options)]  # noqa: UP007


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
