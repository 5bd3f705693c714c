"""Reads rows from JSON-lines and Parquet files; an unusable row is an error that names file and row."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class RowError(ValueError):
    """A data file that cannot be used, with the file and the row."""


def read_rows(
    path: str | os.PathLike[str],
    required: Sequence[str] = (),
    problem: Callable[[dict[str, Any]], str | None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Read all rows of a file.

    Args:
        path: A ``.jsonl`` (``.ndjson``) or ``.parquet`` file.
        required: Keys every row must have, with a value.
        problem: What is wrong with a row, or ``None``.

    Raises:
        RowError: no such file, another format, no rows, a row that is no object, a missing key, or a problem.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise RowError(f"{path}: no such file")
    if path.suffix in (".jsonl", ".ndjson"):
        numbered = list(_json_lines(path))
    elif path.suffix == ".parquet":
        numbered = list(_parquet(path))
    else:
        raise RowError(f"{path}: the format is told by the name, which must end with .jsonl or .parquet")
    if not numbered:
        raise RowError(f"{path}: has no rows")
    for where, row in numbered:
        if missing := [key for key in required if row.get(key) is None]:
            raise RowError(f"{where}: has no {missing[0]!r}; it has {', '.join(map(repr, row)) or 'nothing'}")
        if what := problem(row):
            raise RowError(f"{where}: {what}")
    return [row for _, row in numbered]


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", _json_object(f"{path}, line {number}", line)
        except UnicodeDecodeError as error:
            raise RowError(f"{path}: is not UTF-8 text ({error})") from error


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RowError(f"{where}: is not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise RowError(f'{where}: must be an object like {{"question": ...}}, is a {type(row).__name__}')
    return row


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise RowError(f"{path}: is not a Parquet file that can be read ({error})") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row
