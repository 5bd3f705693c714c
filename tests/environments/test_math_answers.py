"""Answers compared as mathematics, in a process that is killed at its deadline."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from async_rl.environments import GSM8K, Math, MathAnswers, RewardTimeoutError
from async_rl.environments.offload import call_user
from async_rl.environments.rows import RowError


@pytest.fixture(scope="module")
def answers() -> MathAnswers:
    return MathAnswers(timeout_s=10.0)


@pytest.mark.parametrize(
    ("right", "completion", "same"),
    [
        ("72", "48 + 24 = 72\n#### 72", True),
        ("1/2", r"so it is $\frac{2}{4}$", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        ("x^2+2x+1", r"The answer is \boxed{(x+1)^2}.", True),
        (r"\{1,2\}", r"\boxed{2, 1}", True),
        ("[0,1)", "$[0,1)$", True),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}", True),
        ("1,500", r"\boxed{1500}", True),
        ("2", "it is 1+1", True),
        ("72", r"\boxed{71}", False),
        ("72", "", False),
        ("[0,1)", "$[0,1]$", False),
    ],
)
def test_same_and_different_answers(answers: MathAnswers, right: str, completion: str, same: bool) -> None:
    assert answers.same(right, completion) is same


def test_nothing_a_model_wrote_is_evaluated(answers: MathAnswers, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write = f"open('{marker}','w')"
    for completion in (
        write,
        f"\\boxed{{{write}}}",
        f"${write}$",
        f"answer: ({write})",
        f"1+{write}",
        f"\\boxed{{({write})}}",
    ):
        answers.same("3", completion)
    assert not marker.exists()


def test_an_answer_that_takes_for_ever_is_a_failed_sample_and_costs_no_other() -> None:
    answers = MathAnswers(timeout_s=1.0)
    with pytest.raises(RewardTimeoutError, match="took more than 1 s"):
        answers.same("2", r"\boxed{9^{9^{9^9}}}")
    assert answers.same("2", r"\boxed{2}")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'async-rl\[math\]'"):
        MathAnswers()


def test_the_environment_and_gsm8k(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    rows = [{"problem": f"Halve {n}.", "answer": f"\\frac{{{n}}}{{2}}", "level": 1} for n in range(1, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = Math(file, eval_size=2)
    assert (len(env.prompts("train")), len(env.prompts("eval"))) == (3, 2)
    row = env.prompts("train")[2]
    assert env.messages(row).startswith("Halve 3.\n\n")
    assert asyncio.run(call_user(env.reward, row, r"It is \boxed{1.5}.")) == 1.0
    assert env.reward(row, "It is 2.") == 0.0
    assert len(Math(file, eval_path=file, eval_size=4).prompts("eval")) == 4
    with pytest.raises(RowError, match="too few"):
        Math(file, eval_size=5)
    questions = tmp_path / "q.jsonl"
    questions.write_text(
        json.dumps({"question": "3+4?", "answer": "3+4=7\n#### 7"})
        + "\n" * 2
        + json.dumps({"question": "?", "answer": "#### 1"})
    )
    gsm8k = GSM8K(path=questions, eval_size=1, answer_check="math_verify")
    assert [gsm8k.reward(gsm8k.prompts("train")[0], c) for c in (r"\boxed{\frac{14}{2}}", r"\boxed{8}")] == [1.0, 0.0]
    with pytest.raises(ValueError, match="answer_check='latex'"):
        GSM8K(path=questions, eval_size=1, answer_check="latex")  # type: ignore[arg-type]
