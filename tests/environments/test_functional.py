"""Task: rows and a reward function make an environment; row files and their errors."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from async_rl.environments import Task
from async_rl.environments.rows import RowError, read_rows

ROWS = [{"word": "tree", "n": 1}, {"word": "river", "n": 2}]


def shout(prompt: Mapping[str, Any], completion: str, bonus: float = 0.0) -> float:
    return float(prompt["word"].upper() in completion) + bonus


class Shout:
    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        return shout(prompt, completion)


async def ashout(prompt: Mapping[str, Any], completion: str) -> float:
    return shout(prompt, completion)


@pytest.mark.parametrize(
    "reward", [shout, lambda p, c: shout(p, c), functools.partial(shout, bonus=0.0), Shout(), ashout]
)
def test_every_kind_of_callable_and_a_name_that_stays(reward: Any) -> None:
    """CASES 31."""
    task = Task(ROWS, reward, messages="Write {word} in capitals.")
    assert task.messages(ROWS[0]) == "Write tree in capitals."
    assert asyncio.run(task.reward(ROWS[0], "TREE")) == 1.0
    assert asyncio.run(task.reward(ROWS[0], "tree")) == 0.0
    assert task.name == "task"


def test_messages_as_a_function_and_separate_eval_rows() -> None:
    task = Task(ROWS, shout, messages=lambda p: [{"role": "user", "content": p["word"]}], eval_rows=ROWS[:1], name="w")
    assert task.messages(ROWS[1]) == [{"role": "user", "content": "river"}]
    assert (len(task.prompts("train")), len(task.prompts("eval")), task.name) == (2, 1, "w")
    assert Task(ROWS, shout, messages="{word}").prompts("eval") == ROWS


@pytest.mark.parametrize("template", ["{wrod}", "{", "{0}", "{word.x}", "{word!q}"])
def test_a_template_that_does_not_fit_the_rows_is_refused_at_once(template: str) -> None:
    with pytest.raises(ValueError, match=r"messages=.*cannot be filled in.*'word'"):
        Task(ROWS, shout, messages=template)
    with pytest.raises(ValueError, match="cannot be called"):
        Task(ROWS, 3, messages="{word}")  # type: ignore[arg-type]


def test_from_a_config(tmp_path: Path) -> None:
    config = OmegaConf.create(
        {
            "_target_": "async_rl.environments.Task",
            "rows": [{"word": "tree", "meta": {"k": [1]}}],
            "messages": "Write {word}.",
            "reward": {"_target_": f"{__name__}.shout", "_partial_": True, "bonus": 1.0},
        }
    )
    task = instantiate(config)
    (row,) = task.prompts("train")
    assert json.loads(json.dumps(row)) == {"word": "tree", "meta": {"k": [1]}}
    assert asyncio.run(task.reward(row, "TREE")) == 2.0


def test_jsonl_and_parquet(tmp_path: Path) -> None:
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n".join(json.dumps(r) for r in ROWS) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    assert read_rows(lines) == read_rows(str(table)) == ROWS
    assert Task(lines, shout, messages="{word}", eval_rows=table).prompts("eval") == ROWS


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", b'{"word": "x"}\n{"word": \n', r"a\.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"word": "x"}\n\n[1]\n', r"a\.jsonl, line 3: must be an object"),
        ("a.jsonl", b'{"word": "x"}\n{"wrod": "y"}\n', r"a\.jsonl, line 2: has no 'word'; it has 'wrod'"),
        ("a.jsonl", b'{"word": null}\n', r"a\.jsonl, line 1: has no 'word'"),
        ("a.jsonl", b"\n", r"a\.jsonl: has no rows"),
        ("a.jsonl", b"\xff\xfe\n", r"a\.jsonl: is not UTF-8"),
        ("a.parquet", b"nope", r"a\.parquet: is not a Parquet file"),
        ("a.csv", b"word\n", r"a\.csv: the format"),
    ],
)
def test_bad_files_are_named_with_the_row(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RowError, match=match):
        read_rows(tmp_path / name, required=["word"])
    with pytest.raises(RowError, match="no such file"):
        read_rows(tmp_path / "missing.jsonl")
