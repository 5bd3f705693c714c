"""Values against annotations, and annotations read from source."""

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import pytest

from async_rl.annotations import annotated_type
from async_rl.value_types import type_fault

TARGET = {"_target_": "mine.make"}


@pytest.mark.parametrize(
    ("value", "annotation", "fault"),
    [
        ("tree", list[str], "a list of strings, e.g. [tree]"),
        ([1, 2], list[str], "a list of strings, e.g. [a, b]"),
        (3, list[str], "a list of strings, e.g. [a, b]"),
        (3, Sequence[int], "a list of whole numbers, e.g. [3]"),
        (True, list[bool], "a list of true or false, e.g. [true]"),
        (None, list[str], "a list of strings, e.g. [a, b]"),
        ("tree", list[str] | None, "a list of strings or null, e.g. [tree]"),
        ("tree", list[str] | int, "a list of strings or a whole number, e.g. [tree]"),
        ("tree", set[str], "a list of strings, e.g. [tree]"),
        ("tree", tuple[str, ...], "a list of strings, e.g. [tree]"),
        ([1], tuple[int, int], "a list of 2 values, e.g. [1, 1]"),
        ([1, "a"], tuple[int, int], "a list of 2 values, e.g. [1, 1]"),
        ("tree", list, "a list"),
        ("tree", list[Path], "a list"),
        ("red", list[Literal["red", "blue"]], "a list of one of red, blue, e.g. [red]"),
        ([["a"], "b"], list[list[str]], "a list of lists of strings"),
        ([None], list[str | int], "a list of strings or whole numbers"),
        ("x", dict[str, int], "a section of whole numbers, e.g. {a: 1}"),
        ({"a": "x"}, Mapping[str, float], "a section of numbers, e.g. {a: 0.5}"),
        ({"a": 1}, dict[int, float], "a section of numbers by whole numbers"),
        ([1], dict, "a section with keys of its own"),
    ],
)
def test_what_does_not_fit_is_told_with_an_example(value, annotation, fault):
    assert type_fault(value, annotation) == fault


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (["tree"], list[str]),
        ([], list[str]),
        (("tree",), Sequence[str]),
        ("tree", list[str] | str),
        ([1, 2.5], list[float]),
        ([1, 2], set[int]),
        ([1, "a"], tuple[int, str]),
        ({"a": 1, 2: 3}, dict[str, float]),
        ({"a": {"b": ["c"]}}, dict[str, dict[str, list[str]]]),
        ([None, "a"], list[str | None]),
        (TARGET, list[str]),
        (TARGET, int),
        ([TARGET], list[str]),
        ("x", Path),
        ([3], list[Path]),
        ("x", Callable[[int], str]),
    ],
)
def test_what_fits_or_cannot_be_told_is_accepted(value, annotation):
    assert type_fault(value, annotation) == ""


DEFINED = {"Names": "list[str]", "Tree": "dict[str, 'Tree'] | int"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("list[str]", list[str]),
        ("List[str]", list[str]),
        ("typing.Sequence[int]", Sequence[int]),
        ("collections.abc.Mapping[str, float]", Mapping[str, float]),
        ("tuple[int, ...]", tuple[int, ...]),
        ("'list[str] | None'", Union[list[str], None]),  # noqa: UP007
        ("Optional[list[str]]", Union[list[str], None]),  # noqa: UP007
        ("t.Union[int, Literal['a', 'b']]", Union[int, Literal["a", "b"]]),  # noqa: UP007
        ("list[Path]", list[Any]),
        ("list", list),
        ("dict", dict),
        ("Names", list[str]),
        ("Tree", Union[dict[str, Any], int]),  # noqa: UP007
        ("list[str] | Path", None),
        ("Literal[Colour.RED]", None),
        ("Callable[[int], str]", None),
        ("'not a type'", None),
        ("np.ndarray", None),
    ],
)
def test_annotations_are_read_from_source(source, expected):
    def parse(text):
        return ast.parse(text, mode="eval").body

    found = annotated_type(parse(source), lambda name: parse(DEFINED[name]) if name in DEFINED else None)
    assert found == expected
