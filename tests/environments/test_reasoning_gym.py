"""Any reasoning-gym task as an environment: the same problems every time, none in both splits, nothing evaluated."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from async_rl.environments import ReasoningGym
from async_rl.environments import reasoning_gym as adapter
from async_rl.environments.base import RewardError
from async_rl.environments.reasoning_gym import EVALUATING_TASKS, final_answer
from async_rl.environments.worker import WorkerProcess


def dataset(task: str, **config: Any) -> Any:
    return reasoning_gym.create_dataset(task, seed=0, size=20, **config)


def test_an_environment_of_a_task() -> None:
    env = ReasoningGym("leg_counting", size=20, eval_size=5, max_animals=4)
    train, held_out = env.prompts("train"), env.prompts("eval")
    assert (len(train), len(held_out), env.name) == (20, 5, "leg_counting")
    right = dataset("leg_counting", max_animals=4)[3]
    assert train[3]["question"] == right["question"]
    assert right["question"].strip() in env.messages(train[3])
    assert json.loads(json.dumps(train[3])) == train[3]
    assert env.reward(train[3], f"Let me see.\n<answer>{right['answer']}</answer>") == 1.0
    assert env.reward(train[3], f"Let me see.\n{right['answer']}") == 1.0
    assert env.reward(train[3], "<answer>-1</answer>") == 0.0


def test_no_question_is_in_both_splits_and_none_comes_twice() -> None:
    env = ReasoningGym("basic_arithmetic", size=300, eval_size=30, min_digits=1, max_digits=1, min_terms=2, max_terms=2)
    train, held_out = ([row["question"] for row in env.prompts(split)] for split in ("train", "eval"))
    assert len(set(train)) == len(train) < 300
    assert not set(train) & set(held_out)


def test_a_task_with_too_few_different_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="all of size=1 training problems are among"):
        ReasoningGym("coin_flip", size=1, eval_size=300, min_trials=3, max_trials=3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"task": "leg_countin"}, "no such task; did you mean leg_counting"),
        ({"task": "leg_counting", "max_animal": 3}, r"environment\.max_animal: .*did you mean max_animals"),
        ({"task": "leg_counting", "max_animals": -3}, "refuses max_animals=-3: max_animals must be"),
        ({"task": "leg_counting", "size": 0}, "size=0"),
        ({"task": "leg_counting", "seed": -1}, "seed=-1"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest_name(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ReasoningGym(**arguments)


def test_where_the_answer_is_taken_from() -> None:
    assert final_answer("no <answer>1</answer> but <answer> 2 </answer> yes") == "2"
    assert final_answer("so\nit is\n 7 \n") == "7"
    assert final_answer("<answer>8") == "8"
    assert final_answer("") == ""


@pytest.fixture(scope="module")
def worker() -> WorkerProcess:
    return WorkerProcess(adapter.__name__, timeout_s=20.0)


def test_problems_do_not_hang_on_what_was_made_before(worker: WorkerProcess) -> None:
    """Some tasks draw from the global generator."""
    made = "list_functions", 5, 4, "{}"
    first = worker.call("questions", *made)
    assert worker.call("questions", *made) == first
    assert worker.call("score", *made, 2, first[2], "[]") <= 1.0
    with pytest.raises(RewardError, match="made another problem"):
        worker.call("score", *made, 2, first[1], "[]")


EVALUATING = [module for modules in EVALUATING_TASKS.values() for module in modules]


@pytest.mark.parametrize("module", EVALUATING)
def test_tasks_that_evaluate_answers_score_right_ones_and_run_nothing(
    worker: WorkerProcess, module: str, tmp_path: Path
) -> None:
    task = module.rpartition(".")[2]
    (question,) = worker.call("questions", task, 0, 1, "{}")
    right = dataset(task)[0]["answer"]
    if task != "polynomial_multiplication":  # its order of terms hangs on the order of sets
        assert worker.call("score", task, 0, 1, "{}", 0, question, right) == 1.0
    marker = tmp_path / "marker"
    for answer in (f"open('{marker}','w')", f"[open('{marker}','w')]", f"__import__('os').system('touch {marker}')"):
        assert worker.call("score", task, 0, 1, "{}", 0, question, answer) < 1.0
    assert not marker.exists()


def test_every_task_that_evaluates_text_is_known() -> None:
    """A new version of reasoning-gym may bring new ones: then look at them, and add them or not."""
    root = Path(reasoning_gym.__file__).parent
    evaluating = re.compile(r"(?<![\w.])(?:eval|exec)\(|parse_expr|sympify|literal_eval|subprocess|os\.system")
    found = {
        str(file.relative_to(root).with_suffix("")).replace("/", ".")
        for file in root.rglob("*.py")
        if evaluating.search(file.read_text(encoding="utf-8"))
    }
    # These evaluate text of their own, never an answer.
    harmless = {
        *("code.codeio", "algorithmic.number_sorting", "arithmetic.bitwise_arithmetic", "arithmetic.basic_arithmetic"),
        *("arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99"),
        "logic.propositional_logic",  # a parser of its own, of the same name
    }
    assert found - harmless == set(EVALUATING)
    for module in EVALUATING:
        importlib.import_module(f"reasoning_gym.{module}")
