"""GSM8K: where the data comes from, in which order, and what is a right answer."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

import async_rl.hub
from async_rl.environments import GSM8K
from async_rl.environments.numbers import final_number
from async_rl.environments.rows import RowError

ROWS = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and half as many in May. How many altogether?",
        "answer": "In May <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72",
    },
    {"question": "A house costs $1,000 and a half. What is the price?", "answer": "Well.\n#### 1,500"},
    {"question": "It was 3 degrees and fell by 5. What now?", "answer": "3-5 = -2\n#### -2"},
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: None)
    monkeypatch.setattr(async_rl.hub, "reachable", lambda timeout_s=2.0: False)


@pytest.mark.parametrize(
    "names", [("train.jsonl", "test.jsonl"), ("main/train-00000-of-00001.parquet", "test.parquet")]
)
def test_from_a_directory(tmp_path: Path, names: tuple[str, str]) -> None:
    write(tmp_path / names[0], ROWS)
    write(tmp_path / names[1], ROWS[1:])
    env = GSM8K(path=tmp_path)
    assert (len(env.prompts("train")), len(env.prompts("eval"))) == (3, 2)
    assert env.source == str(tmp_path)
    assert len(GSM8K(path=tmp_path, eval_size=1).prompts("eval")) == 1


def test_from_one_file_keeps_the_end_for_evaluation(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", ROWS)
    env = GSM8K(path=file, eval_size=2)
    assert [r["answer"] for r in env.prompts("train")] == [ROWS[0]["answer"]]
    assert [r["answer"] for r in env.prompts("eval")] == [r["answer"] for r in ROWS[1:]]
    with pytest.raises(RowError, match="too few"):
        GSM8K(path=file, eval_size=3)


def test_bad_rows_name_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", ROWS)
    write(tmp_path / "train.jsonl", [*ROWS, {"question": "Why?", "answer": "because"}])
    with pytest.raises(RowError, match=r"train\.jsonl, line 4: the answer has no number: 'because'"):
        GSM8K(path=tmp_path)
    write(tmp_path / "train.jsonl", [ROWS[0], {"question": "Why?"}])  # type: ignore[list-item]
    with pytest.raises(RowError, match=r"train\.jsonl, line 2: has no 'answer'"):
        GSM8K(path=tmp_path)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(RowError, match=r"no train split; give a directory with one of train\.jsonl"):
        GSM8K(path=tmp_path)
    with pytest.raises(RowError, match=r"environment\.path=.*no such file or directory"):
        GSM8K(path=tmp_path / "missing")


@pytest.mark.parametrize(
    ("row", "completion", "reward"),
    [
        (0, "48 + 24 = 72\n#### 72", 1.0),
        (0, "#### $72.00", 1.0),
        (0, "The answer is 72 clips.", 1.0),
        (0, "72, no: #### 71", 0.0),
        (0, "", 0.0),
        (1, "#### 1500", 1.0),
        (1, "#### 1,500.0 dollars", 1.0),
        (2, "#### -2", 1.0),
        (2, "#### 2", 0.0),
    ],
)
def test_the_final_number_decides(tmp_path: Path, row: int, completion: str, reward: float) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS)
    env = GSM8K(path=tmp_path)
    prompt = env.prompts("train")[row]
    assert env.reward(prompt, completion) == reward
    assert prompt["question"] in env.messages(prompt)[0]["content"]


def test_the_hubs_cache_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> bool:
        raise AssertionError("the network was asked although everything is cached")

    monkeypatch.setattr(async_rl.hub, "reachable", asked)
    file = write(tmp_path / "cached.parquet", ROWS)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name, repo_type: str(file))
    env = GSM8K()
    assert env.source == "openai/gsm8k (Hub cache)"
    assert len(env.prompts("train")) == 3


def test_the_hub_comes_before_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_cached: None
) -> None:
    file = write(tmp_path / "down.parquet", ROWS)
    monkeypatch.setattr(async_rl.hub, "reachable", lambda timeout_s: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, repo_type: str(file))
    assert GSM8K(strict=True).source == "openai/gsm8k (Hub)"


def test_without_network_the_stand_in_is_announced(caplog: pytest.LogCaptureFixture, nothing_cached: None) -> None:
    with caplog.at_level(logging.WARNING):
        env = GSM8K(eval_size=50)
    assert "reasoning-gym" in env.source
    assert "NOT GSM8K" in env.source
    assert "does not train on GSM8K" in caplog.text
    assert "environment.path=" in caplog.text
    train, evaluation = env.prompts("train"), env.prompts("eval")
    assert (len(train), len(evaluation)) == (7473, 50)
    assert not {r["question"] for r in train} & {r["question"] for r in evaluation}
    assert all(final_number(r["answer"]) is not None for r in [*train, *evaluation])
    assert all(env.reward(r, f"#### {r['answer']}") == 1.0 for r in evaluation)
    assert GSM8K(eval_size=50).prompts("train") == train, "the same problems in every run"


def test_strict_refuses_the_stand_in_and_names_the_local_path(nothing_cached: None) -> None:
    """CASES 34."""
    with pytest.raises(async_rl.hub.SourceNotFoundError, match=r"environment\.path"):
        GSM8K(strict=True)


def test_a_hub_that_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, nothing_cached: None, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*args: Any, **kwargs: Any) -> str:
        raise OSError("403 forbidden")

    monkeypatch.setattr(async_rl.hub, "reachable", lambda timeout_s: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuses)
    GSM8K()
    assert "403 forbidden" in caplog.text


@pytest.mark.skipif("ASYNC_RL_TEST_GSM8K" not in os.environ, reason="ASYNC_RL_TEST_GSM8K names no GSM8K directory")
def test_the_real_data_set() -> None:
    env = GSM8K(path=os.environ["ASYNC_RL_TEST_GSM8K"])
    train, evaluation = env.prompts("train"), env.prompts("eval")
    assert (len(train), len(evaluation)) == (7473, 1319)
    for row in [*train, *evaluation]:
        gold = row["answer"].rpartition("####")[2].strip()
        assert env.reward(row, f"Surely 3. #### {gold}") == 1.0
        assert env.reward(row, f"It is {gold}.") == 1.0
        assert env.reward(row, f"#### {gold}1") == 0.0
