"""Says whether a JSON value fits a schema, of the kind that ``transformers.utils.get_json_schema`` makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def type_fault(value: Any, schema: Mapping[str, Any]) -> str:
    """What a JSON value should have been, or ``""`` where it fits the schema."""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        faults = [type_fault(value, option) for option in schema["anyOf"]]
        return "" if "" in faults else " or ".join(faults)
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {json.dumps(schema['enum'])}"
    names = schema.get("type", ())
    names = [names] if isinstance(names, str) else list(names)
    if names and not any(_is_a(value, name) for name in names):
        return " or ".join(names)
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if len(items) != len(value):
            return f"an array of {len(items)} items"
        return next(
            (f"an array whose items are {f}" for v, i in zip(value, items, strict=True) if (f := type_fault(v, i))), ""
        )
    if isinstance(value, dict):
        inner = schema.get("additionalProperties", {})
        return next((f"an object whose values are {f}" for v in value.values() if (f := type_fault(v, inner))), "")
    return ""


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):  # to Python a bool is an int, to JSON it is not
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, (object,)))
