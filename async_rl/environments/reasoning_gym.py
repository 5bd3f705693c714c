"""ReasoningGym: any task of the package reasoning-gym as an environment, made and scored in a killable process."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import RolloutError, SingleTurn
from async_rl.environments.worker import WorkerProcess

INSTRUCTION = "{question}\n\nGive the final answer between <answer> and </answer>."
_GENERATION_TIMEOUT_S = 600.0
_EVAL_SEED = 10_000_000  # tasks make problem i of seed + i; no training set reaches that far


class ReasoningGym(SingleTurn):
    """A procedural task such as ``leg_counting``; the reward is the task's own score, in [0, 1].

    What stands between the last ``<answer>`` and ``</answer>`` is scored, else the last line. Training and evaluation
    have no question in common. Some tasks score with Python's ``eval`` or sympy's parser, which evaluates, too; here
    they get parsers of ours in their place, so that no text of a model is ever run.

    Args:
        task: Name of the task.
        size: Training problems, >= 1; those that are also in the evaluation, or twice, are left out.
        eval_size: Evaluation problems, >= 1.
        seed: Makes the problems; the same ones in every run.
        instruction: What to ask: a ``str.format`` template with ``{question}``.
        timeout_s: Deadline of scoring one answer in seconds, > 0.
        name: Name for metrics and the ledger; default: the task's.
        **config: Settings of the task, for instance ``max_animals=5``.

    Attributes:
        source: What was taken, for the run's header.

    Raises:
        ValueError: no such task or setting (the nearest names are suggested), a value that the task refuses, or too
            few different problems.
    """

    def __init__(
        self,
        task: str,
        size: int = 2000,
        eval_size: int = 200,
        seed: int = 0,
        instruction: str = INSTRUCTION,
        timeout_s: float = 5.0,
        name: str = "",
        **config: Any,
    ) -> None:
        if size < 1 or eval_size < 1:
            raise ValueError(f"environment.size={size}, eval_size={eval_size}: each must be >= 1")
        if not 0 <= seed < _EVAL_SEED:
            raise ValueError(f"environment.seed={seed}: must be in [0, {_EVAL_SEED})")
        instruction.format(question="")
        config = _plain(config)
        _check(task, config)
        self.name = name or task
        self.source = f"reasoning-gym {task}, seed {seed}"
        self._instruction = instruction
        self._task, self._config = task, json.dumps(config)
        # Problems are made where they are scored: those that hang on the order of sets are the same in every run.
        self._worker = WorkerProcess(__name__, timeout_s=timeout_s)
        held_out = self._problems(seed + _EVAL_SEED, eval_size)
        self._eval = list(held_out.values())
        self._train = [row for question, row in self._problems(seed, size).items() if question not in held_out]
        if not self._train:
            raise ValueError(
                f"environment.task={task}: all of size={size} training problems are among the {len(held_out)} of the "
                "evaluation; raise size, lower eval_size, or make the task richer by its settings"
            )

    def _problems(self, seed: int, size: int) -> dict[str, dict[str, Any]]:
        """Rows by question."""
        dataset = (self._task, seed, size, self._config)
        try:
            asked = self._worker.call("questions", *dataset, timeout_s=_GENERATION_TIMEOUT_S)
        except RolloutError as error:
            raise ValueError(f"environment.task={self._task}: {error}") from error
        return {q: {"question": q, "seed": seed, "size": size, "index": i} for i, q in enumerate(asked)}

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> str:
        return self._instruction.format(question=prompt["question"].strip())

    @override
    def reward(self, prompt: Mapping[str, Any], completion: str) -> float:
        dataset = (self._task, prompt["seed"], prompt["size"], self._config)
        answer = final_answer(completion)
        return float(self._worker.call("score", *dataset, prompt["index"], prompt["question"], answer))


def final_answer(completion: str) -> str:
    """What the completion gives as its answer: the last ``<answer>`` element, else the last line."""
    before, opened, inside = completion.rpartition("<answer>")
    if opened:
        return inside.partition("</answer>")[0].strip()
    return (before or inside).strip().rpartition("\n")[2].strip()


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Plain lists and dicts instead of a config's nodes."""
    from omegaconf import OmegaConf

    return {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in config.items()}


def _check(task: str, config: Mapping[str, Any]) -> None:
    """Refuse a task or setting that does not exist, and values the task refuses."""
    import reasoning_gym  # noqa: F401, registers the tasks
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(DATASETS))}"
        raise ValueError(f"environment.task={task}: reasoning-gym has no such task; {hint}")
    make_config = DATASETS[task][1]
    settings = [f.name for f in dataclasses.fields(make_config) if f.name not in ("seed", "size")]
    if unknown := [key for key in config if key not in settings]:
        close = difflib.get_close_matches(unknown[0], settings, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(settings) or 'none'}"
        raise ValueError(f"environment.{unknown[0]}: {task} has no such setting; {hint}")
    try:
        made = make_config(**config)
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in config.items())
        raise ValueError(f"environment: {task} refuses {given or 'its defaults'}: {error}") from error


# the process's side


def questions(task: str, seed: int, size: int, config: str) -> list[str]:
    """The questions of a data set, in order; ``config`` is JSON."""
    return [_problem(task, seed, size, config, index)[1]["question"] for index in range(size)]


def score(task: str, seed: int, size: int, config: str, index: int, question: str, answer: str) -> float:
    """The task's score of an answer to problem ``index`` of a data set."""
    dataset, problem = _problem(task, seed, size, config, index)
    if problem["question"] != question:
        raise RuntimeError(f"{task} made another problem {index} than before, so it can't be scored")
    return float(dataset.score_answer(answer, problem))


def _problem(task: str, seed: int, size: int, config: str, index: int) -> tuple[Any, dict[str, Any]]:
    """A data set and one of its problems."""
    dataset = _dataset(task, seed, size, config)
    random.seed(seed + index)  # a few tasks draw from the global generator
    return dataset, dataset[index]


@functools.lru_cache(maxsize=8)
def _dataset(task: str, seed: int, size: int, config: str) -> Any:
    import reasoning_gym

    _replace_evaluation()
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config))


EVALUATING_TASKS = {
    "literal": (
        "algorithmic.string_insertion",
        "algorithmic.spiral_matrix",
        "algorithmic.binary_matrix",
        "games.n_queens",
    ),
    "arithmetic": ("games.countdown", "games.puzzle24"),
    "symbolic": (
        "algebra.simple_integration",
        "algebra.intermediate_integration",
        "algebra.polynomial_multiplication",
    ),
}
"""Modules that evaluate an answer as Python when they score it, by what the answer is meant to be."""


def _replace_evaluation() -> None:
    """Give those modules parsers in place of ``eval`` and of sympy's parser."""
    import ast
    import importlib

    import sympy

    from async_rl.environments.expression import evaluate
    from async_rl.environments.symbolic import parse_symbolic

    for name in EVALUATING_TASKS["literal"]:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    for name in EVALUATING_TASKS["arithmetic"]:
        importlib.import_module(f"reasoning_gym.{name}").parse_expr = evaluate  # type: ignore[attr-defined]
    sympy.parse_expr = parse_symbolic
